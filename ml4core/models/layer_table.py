"""params.json, and the tensors that exist, as the table of layers.

Every trait is a layer's own; nothing here asks which model it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ml4core.api import IndexerSpec, LayerSpec, ModelSpec, MoESpec
from ml4core.models import schedules
from ml4core.models.assumptions import Choices, Evidence
from ml4core.models.errors import shown
from ml4core.models.evidence import Shapes, Tensors
from ml4core.models.params import Indexer, MoE, Params
from ml4core.models.params_checks import head_dim_problems
from ml4core.models.params_file import PARAMS_FILE, parse_params, refusal
from ml4core.models.positions import max_position, rope_spec, softmax_scale
from ml4core.models.scaling import index_ssmax, query_ssmax

EXTRA_BLOCKS = ("quantization", "quantization_config", "vision_encoder", "multimodal", "mtp")
DROPPED_ROPE_ROWS = "nope_wkv_a_rope_rows"
"""Key of `ModelSpec.extras`: rows for a rope part in wkv_a of NoPE layers, which are not used."""


def build_model_spec(
    params: Params | Mapping[str, Any],
    tensors: Shapes | None = None,
    name: str = "",
    where: str = PARAMS_FILE,
) -> ModelSpec:
    """The whole decoder of `params`, the content of a params.json or that content parsed.

    `tensors` maps the names in a checkpoint to (dtype, shape). With it, what params.json leaves
    open is taken from the tensors where they show it. Whatever it leaves open is in `assumptions`.

    Raises CheckpointError that lists every fault of params.json, and every stated trait that the
    tensors contradict. Shapes are compared by `ml4core.models.tensors.validate`.
    """
    if not isinstance(params, Params):
        params = parse_params(params, where)
    return _Table(params, Tensors(tensors), where).build(name)


class _Table:
    """One build: the choices made so far, and what is wrong with them."""

    def __init__(self, params: Params, tensors: Tensors, where: str) -> None:
        self.params = params
        self.tensors = tensors
        self.where = where
        self.choices = Choices()
        self.problems: list[str] = []
        self.nope = schedules.nope_layers(params)
        self.rope_layer = next((n for n in range(params.n_layers) if n not in self.nope), None)
        self.nope_layer = min(self.nope, default=None)

    def build(self, name: str) -> ModelSpec:
        p = self.params
        norm_eps = self.choices.take("norm_eps", p.norm_eps)
        vocab = self.choices.take(
            "vocab_size", p.vocab_size, seen=self.tensors.size("tok_embeddings")
        )
        self._head_dims()
        rope = rope_spec(p, self.tensors, self.choices) if self.rope_layer is not None else None
        full = self._index_owners()
        indexer = self._indexer(p.indexer) if p.indexer is not None else None
        ssmax = query_ssmax(p, self.tensors, self.choices)
        moe = self._moe(p.moe) if p.moe is not None else None
        dense_width = self._dense_width()
        extras = self._extras()
        sources = schedules.kv_sources(p)
        if sources:
            self.choices.take("kv_sharing_own_wkv_b", p.kv_sharing_own_wkv_b)
        topk = schedules.topk_sources(full) if full is not None else None
        if self.problems:
            raise refusal(self.problems, self.where)

        layers = []
        for index in range(p.n_layers):
            is_nope = index in self.nope
            is_moe = schedules.is_moe(p.moe, index)
            own_index = topk is not None and topk[index] == index
            layers.append(
                LayerSpec(
                    index=index,
                    hidden_size=p.dim,
                    heads=p.n_heads,
                    kv_lora_rank=p.kv_lora_rank,
                    q_lora_rank=p.q_lora_rank,
                    nope_dim=self.nope_dim if is_nope else self.rope_nope_dim,
                    rope_dim=0 if is_nope else p.qk_rope_head_dim,
                    v_dim=self.v_dim,
                    norm_eps=norm_eps,
                    softmax_scale=(
                        softmax_scale(self.nope_dim, None)
                        if is_nope
                        else softmax_scale(self.rope_nope_dim, rope)
                    ),
                    rope=None if is_nope else rope,
                    ssmax=ssmax,
                    kv_source=sources.get(index, index),
                    topk_source=topk[index] if topk is not None else None,
                    indexer=indexer[is_nope] if indexer is not None and own_index else None,
                    dense_width=None if is_moe else dense_width,
                    moe=moe if is_moe else None,
                )
            )
        return ModelSpec(
            name=name,
            vocab_size=vocab,
            hidden_size=p.dim,
            norm_eps=norm_eps,
            max_position=max_position(p, self.choices),
            tied_embeddings=p.tied_embeddings,
            layers=tuple(layers),
            taps=self._taps(),
            assumptions=self.choices.record,
            extras=extras,
        )

    def _head_dims(self) -> None:
        """Sets v_dim, and the query dims without rope of rope layers and of NoPE layers."""
        p, heads = self.params, self.params.n_heads
        first = f"layers.{self.rope_layer or 0}.attention."
        self.v_dim = self.choices.take(
            "v_head_dim", p.v_head_dim, seen=self.tensors.size(first + "wo", 1, parts=heads)
        )
        self.rope_nope_dim = self.choices.take(
            "qk_nope_head_dim",
            p.qk_nope_head_dim,
            seen=self.tensors.size(first + "wkv_b", parts=heads, less=self.v_dim),
        )
        self.problems += head_dim_problems(p, self.rope_nope_dim)
        self.nope_dim = self.rope_nope_dim
        if self.nope_layer is not None:
            first = f"layers.{self.nope_layer}.attention."
            self.nope_dim = self.choices.take(
                "nope_qk_head_dim",
                p.nope_qk_head_dim,
                self.rope_nope_dim,
                self.tensors.size(first + "wkv_b", parts=heads, less=self.v_dim),
            )

    def _index_owners(self) -> tuple[bool, ...] | None:
        """For each layer whether it owns an indexer; None if there is none."""
        p = self.params
        if p.indexer is None:
            return None
        nope_owners = bool(self.nope) and self.choices.take(
            "indexer.nope_owners", p.indexer.nope_owners
        )
        have = self.tensors.layers_with("attention.indexer.")
        seen = tuple(layer in have for layer in range(p.n_layers)) if have else None
        stated = next(iter(schedules.stated_full(p.indexer, p.n_layers).items()), None)
        if stated is None:
            full = seen or schedules.default_full(p.n_layers, self.nope)
            owners = [layer for layer, owns in enumerate(full) if owns]
            origin = "taken from the tensors" if seen else "the default"
            text = f"{len(owners)} owners, {shown(owners, 512)}: not stated; {origin}"
            self.choices.note("indexer.types", text)
            self.problems += schedules.pattern_problems(
                full, p.n_layers, self.nope, nope_owners, "indexer.types"
            )
            return full
        key, full = stated
        if seen is not None:
            for layer, (says, has) in enumerate(zip(full, seen, strict=True)):
                if says != has:
                    self.problems.append(
                        f"{key}: layer {layer} is {'full' if says else 'shared'}, but the "
                        f"checkpoint has {'tensors' if has else 'no tensor'} at "
                        f"layers.{layer}.attention.indexer"
                    )
        return full

    def _indexer(self, block: Indexer) -> dict[bool, IndexerSpec]:
        """The indexer of rope layers (False) and of NoPE layers (True)."""
        p, take, tensors = self.params, self.choices.take, self.tensors
        first = f"layers.{min(tensors.layers_with('attention.indexer.'), default=0)}.attention."
        take("indexer.scale_fmt", block.scale_fmt)
        query_norm = take(
            "indexer.q_norm",
            block.q_norm,
            seen=tensors.presence(first + "indexer.q_norm", (first + "indexer.wk",)),
        )
        rope = IndexerSpec(
            heads=take(
                "indexer.n_heads",
                block.n_heads,
                seen=tensors.size(first + "indexer.weights_proj"),
            ),
            head_dim=block.head_dim,
            topk=block.topk,
            rope_dim=p.qk_rope_head_dim,
            rope_interleaved=take("indexer.rope_interleave", block.rope_interleave),
            query_input=block.query_input or ("hidden" if p.q_lora_rank is None else "q_lora"),
            query_norm=query_norm,
            norm_eps=take("indexer.norm_eps", block.norm_eps),
            hadamard=take("indexer.hadamard", block.hadamard),
            ssmax=index_ssmax(p, block, self.tensors, self.choices),
        )
        return {False: rope, True: replace(rope, rope_dim=0)}

    def _moe(self, block: MoE) -> MoESpec:
        layer = next((n for n in range(self.params.n_layers) if schedules.is_moe(block, n)), 0)
        width = self.choices.take(
            "moe.expert_hidden_dim",
            block.expert_hidden_dim,
            seen=self.tensors.size(f"layers.{layer}.experts.0.w1"),
        )
        shared = 0
        if block.num_shared_experts:
            shared = self.choices.take(
                "moe.shared_expert_hidden_dim",
                block.shared_expert_hidden_dim,
                width * block.num_shared_experts,
                self.tensors.size(f"layers.{layer}.shared_experts.w1"),
            )
        strategy = self.choices.take("moe.renorm_strategy", block.renorm_strategy)
        return MoESpec(
            experts=block.num_experts,
            topk=block.num_experts_per_tok,
            expert_width=width,
            shared_width=shared,
            routed_scale=self.choices.take("moe.routed_scale", block.routed_scale),
            renormalize=strategy == "WEIGHTS",
        )

    def _dense_width(self) -> int | None:
        p = self.params
        dense = [n for n in range(p.n_layers) if not schedules.is_moe(p.moe, n)]
        if not dense:
            return None
        seen = self.tensors.size(f"layers.{dense[0]}.feed_forward.w1")
        return self.choices.take("hidden_dim", p.hidden_dim, seen=seen)

    def _taps(self) -> tuple[int, ...]:
        mtp = self.params.mtp or {}
        return tuple(mtp.get("target_layers") or mtp.get("taps") or ())

    def _extras(self) -> dict[str, object]:
        p = self.params
        extras: dict[str, object] = {
            name: value for name in EXTRA_BLOCKS if (value := getattr(p, name)) is not None
        }
        if p.mtp is not None:
            self.choices.note("mtp", "the block is kept as it stands in the file")
        if p.vision_encoder is not None or p.multimodal is not None:
            self.choices.note("vision_encoder", "the block is kept as it stands in the file")
        owners = self.nope - schedules.kv_sources(p).keys()
        if owners and p.qk_rope_head_dim:
            rows = self.tensors.size(f"layers.{min(owners)}.attention.wkv_a_with_mqa")
            wide = p.kv_lora_rank + p.qk_rope_head_dim
            seen = Evidence(rows.value == wide, rows.source) if rows is not None else None
            if self.choices.take("nope_wkv_a_rope_rows", p.nope_wkv_a_rope_rows, seen=seen):
                extras[DROPPED_ROPE_ROWS] = p.qk_rope_head_dim
        return extras
