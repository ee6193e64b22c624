"""The drafter's dimensions, from the `mtp` block of params.json and from its tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar

from ml4core.api import DraftSpec, LayerSpec, ModelSpec, RopeSpec, SSMaxSpec, YarnSpec
from ml4core.api.speculation import AnchorVector
from ml4core.models import positions
from ml4core.models.assumptions import Evidence
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark_names import PREFIX, inner_name
from ml4core.models.dspark_params import Mtp, check_of, parse_mtp
from ml4core.models.errors import shown
from ml4core.models.evidence import Shapes, Tensors
from ml4core.models.params import Yarn
from ml4core.models.params_file import PARAMS_FILE, refusal
from ml4core.models.tensors import shapes_of

T = TypeVar("T")
Scope = Literal["global", "layer"]

_TARGET = "as the target"
_ATTENTION = "layers.0.attention."


def draft_spec(
    model: ModelSpec, tensors: Shapes | None = None, where: str = PARAMS_FILE
) -> DraftSpec:
    """The drafter that the `mtp` block among `model.extras` describes.

    `tensors` maps the names in a checkpoint to (dtype, shape): what the block leaves open is taken
    from the drafter's tensors where they show it. Whatever it leaves open is in `assumptions`.

    Raises CheckpointError that lists every fault: no block, unknown keys, wrong values, and all by
    which the drafter does not fit its target.
    """
    mtp = parse_mtp(model.extras.get("mtp"), where)
    return _Drafter(model, mtp, Tensors(tensors, inner_name), where).build()


def with_drafter(checkpoint: Checkpoint, model: ModelSpec) -> ModelSpec:
    """`model`, the checkpoint's, with its drafter. Raises CheckpointError, as `draft_spec`."""
    tensors = shapes_of(checkpoint)
    where = f"{checkpoint.path}"
    if tensors and not any(name.startswith(PREFIX) for name in tensors):
        raise refusal([f"mtp: no tensor {PREFIX}* is there; the drafter is not included"], where)
    draft = draft_spec(model, tensors or None, where)
    return replace(model, draft=draft, taps=draft.taps)


class _Drafter:
    """One build: the choices made so far, and what is wrong with them."""

    def __init__(self, model: ModelSpec, mtp: Mtp, tensors: Tensors, where: str) -> None:
        self.model = model
        self.mtp = mtp
        self.tensors = tensors
        self.where = where
        self.record: dict[str, str] = {}
        self.problems: list[str] = []
        # The drafter's layers are alike to this one of the target's, if nothing else is known.
        self.like = next((one for one in model.layers if one.rope is not None), model.layers[0])

    def build(self) -> DraftSpec:
        take, size = self.take, self.tensors.size
        taps = self._taps()
        self._fit(taps)
        depth = take("depth", self.mtp.depth, 3)
        mask_rows = take("mask_rows", self.mtp.mask_rows, depth - 1, size("mask_embeddings"))
        default: AnchorVector = "none" if mask_rows < depth else "add"
        anchor_vector = take("anchor_vector", self.mtp.anchor_vector, default)
        self._fit_masks(depth, mask_rows, anchor_vector)
        rank = take("markov_rank", self.mtp.markov_rank, 512, size("markov_head.w1", 1))
        layers = self._layers()
        if self.problems:
            raise refusal(self.problems, self.where)
        return DraftSpec(
            hidden_size=self.model.hidden_size,
            vocab_size=self.model.vocab_size,
            norm_eps=layers[0].norm_eps,
            layers=layers,
            taps=taps,
            depth=depth,
            mask_rows=mask_rows,
            anchor_vector=anchor_vector,
            window=take("sliding_window", self.mtp.sliding_window, 2048),
            window_mode=take("window_mode", self.mtp.window_mode, "row"),
            head=take("markov_head", self.mtp.markov_head, "rnn"),
            markov_rank=rank,
            normed_head_input=take("head_input", self.mtp.head_input, "normed") == "normed",
            assumptions=self.record,
        )

    def take(
        self,
        key: str,
        stated: T | None,
        default: T,
        seen: Evidence | None = None,
        origin: str = "the default",
    ) -> T:
        """The value of a key: as stated, else as `seen` in tensors, else the default."""
        if stated is not None:
            return stated
        value: T = default
        if seen is not None:
            value, origin = seen.value, f"taken from {PREFIX}{seen.source}"
        self._note(key, f"{shown(value)}: not stated; {origin}")
        return value

    def _note(self, key: str, text: str) -> None:
        self.record[f"A18/mtp.{key}"] = f"{text}. Checked by: {check_of(key)}"

    def _taps(self) -> tuple[int, ...]:
        key = "taps" if self.mtp.target_layers is None else "target_layers"
        taps = self.mtp.taps if self.mtp.target_layers is None else self.mtp.target_layers
        last = len(self.model.layers) - 1
        if not taps:
            self.problems.append(
                f"mtp.target_layers: {taps}; the target's layers whose results the drafter is "
                f"given must be stated: some of 0 to {last}"
            )
            return ()
        if max(taps) > last:
            self.problems.append(f"mtp.{key}: {shown(taps)}; the target has layers 0 to {last}")
        if len(set(taps)) < len(taps):
            self.problems.append(f"mtp.{key}: {shown(taps)} names a layer twice")
        return tuple(taps)

    def _fit(self, taps: tuple[int, ...]) -> None:
        """What the drafter must have in common with the target, whose embedding it shares."""
        model, size = self.model, self.tensors.size
        for key, stated, wanted, seen in (
            ("dim", self.mtp.dim, model.hidden_size, size("fc")),
            ("vocab_size", self.mtp.vocab_size, model.vocab_size, size("markov_head.w1")),
        ):
            shared = f"the target's {key} is {wanted}; the drafter shares its embedding and output"
            if stated not in (None, wanted):
                self.problems.append(f"mtp.{key}: {stated}; {shared}")
            if seen is not None and seen.value != wanted:
                self.problems.append(
                    f"{PREFIX}{seen.source}: for a {key} of {seen.value}; {shared}"
                )
        joined = size("fc", 1)
        if joined is not None and not self.problems and joined.value % model.hidden_size == 0:
            count = joined.value // model.hidden_size
            if count != len(taps):
                self.problems.append(
                    f"mtp.target_layers: {shown(list(taps))} are {len(taps)} layers, but "
                    f"{PREFIX}{joined.source} joins {count}"
                )

    def _fit_masks(self, depth: int, mask_rows: int, anchor_vector: str) -> None:
        if mask_rows not in (depth - 1, depth):
            self.problems.append(
                f"mtp.mask_rows: {mask_rows}; a depth of {depth} has {depth - 1} learned vectors, "
                f"or {depth} with the anchor's own"
            )
        elif (anchor_vector == "none") != (mask_rows < depth):
            right = "'none'" if mask_rows < depth else "'add' or 'replace'"
            self.problems.append(
                f"mtp.anchor_vector: {anchor_vector!r}; with {mask_rows} learned vectors for a "
                f"depth of {depth} it must be {right}"
            )

    def _layers(self) -> tuple[LayerSpec, ...]:
        mtp, like, size = self.mtp, self.like, self.tensors.size
        up, down = _ATTENTION + "wkv_b", _ATTENTION + "wkv_a_with_mqa"

        def take(key: str, default: int, seen: Evidence | None) -> int:
            return self.take(key, getattr(mtp, key), default, seen, _TARGET)

        heads = take("n_heads", like.heads, None)
        latent = take("kv_lora_rank", like.kv_lora_rank, size(up, 1))
        rope_dim = take("qk_rope_head_dim", like.rope_dim, size(down, less=latent))
        v_dim = take("v_head_dim", like.v_dim, size(_ATTENTION + "wo", 1, parts=heads))
        nope_dim = take("qk_nope_head_dim", like.nope_dim, size(up, parts=heads, less=v_dim))
        rope = self._rope(rope_dim) if rope_dim else None
        first = LayerSpec(
            index=0,
            hidden_size=self.model.hidden_size,
            heads=heads,
            kv_lora_rank=latent,
            q_lora_rank=self._q_lora_rank(),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            v_dim=v_dim,
            norm_eps=self.take("norm_eps", mtp.norm_eps, self.model.norm_eps, origin=_TARGET),
            softmax_scale=positions.softmax_scale(nope_dim, rope),
            rope=rope,
            ssmax=SSMaxSpec(),
            kv_source=0,
            topk_source=None,
            indexer=None,
            dense_width=self._dense_width(),
            moe=None,
        )
        return tuple(replace(first, index=n, kv_source=n) for n in range(self._count()))

    def _count(self) -> int:
        here = self.tensors.layers_with("")
        seen = Evidence(max(here) + 1, "layers.*") if here else None
        return self.take("n_layers", self.mtp.n_layers, 3, seen)

    def _q_lora_rank(self) -> int | None:
        if "q_lora_rank" in self.mtp.model_fields_set:
            return self.mtp.q_lora_rank
        rank, origin = self.like.q_lora_rank, _TARGET
        if self.tensors.has(_ATTENTION + "wq"):
            rank, origin = None, f"taken from {PREFIX}{_ATTENTION}wq being here"
        elif (seen := self.tensors.size(_ATTENTION + "wq_a")) is not None:
            rank, origin = seen.value, f"taken from {PREFIX}{seen.source}"
        self._note("q_lora_rank", f"{rank}: not stated; {origin}")
        return rank

    def _dense_width(self) -> int:
        dense = (one.dense_width for one in self.model.layers)
        target = next((width for width in dense if width is not None), None)
        seen = self.tensors.size("layers.0.feed_forward.w1")
        if target is None and self.mtp.hidden_dim is None and seen is None:
            self.problems.append("mtp.hidden_dim: missing; the target has no dense layer to follow")
        return self.take("hidden_dim", self.mtp.hidden_dim, target or 1, seen, _TARGET)

    def _rope(self, dim: int) -> RopeSpec:
        mtp, target = self.mtp, self.like.rope
        if dim % 2:
            self.problems.append(f"mtp.qk_rope_head_dim: {dim} is odd; rotation works on pairs")
        if target is None:
            if mtp.rope_theta is None:
                self.problems.append("mtp.rope_theta: missing; the target has no rotary embedding")
            target = RopeSpec(dim, 1.0)
        yarn = target.yarn
        if "yarn" in mtp.model_fields_set:
            yarn = self._yarn(mtp.yarn) if mtp.yarn is not None else None
        else:
            self._note("yarn", f"{'stretched' if yarn else 'not stretched'}: not stated; {_TARGET}")
        rope = RopeSpec(
            dim=dim,
            theta=self.take("rope_theta", mtp.rope_theta, target.theta, origin=_TARGET),
            interleaved=self.take(
                "rope_interleave", mtp.rope_interleave, target.interleaved, origin=_TARGET
            ),
            yarn=yarn,
        )
        return self._learned(rope, target)

    def _yarn(self, block: Yarn) -> YarnSpec:
        target = self.like.rope.yarn if self.like.rope is not None else None
        return YarnSpec(
            factor=block.factor,
            original_max_position=self.take(
                "yarn.original_max_position_embeddings",
                block.original_max_position_embeddings,
                target.original_max_position if target is not None else 8192,
                origin=_TARGET if target is not None else "the default",
            ),
            beta_fast=block.beta or positions.BETA_FAST,
            beta_slow=block.alpha or positions.BETA_SLOW,
            apply_scale=block.apply_scale or False,
        )

    def _learned(self, rope: RopeSpec, target: RopeSpec) -> RopeSpec:
        """`rope` with learned frequencies, if there are any."""
        block = self.mtp.lerope
        if block is None and "lerope" in self.mtp.model_fields_set:
            return rope
        scope: Scope | None = block.scope if block is not None else None
        origin = f"taken from {PREFIX}*rope_freqs"
        if scope is None and self.tensors.layers_with("attention.rope_freqs"):
            scope = "layer"
        elif scope is None and self.tensors.has("rope_freqs"):
            scope = "global"
        elif target.lerope != "none" and target.lerope_scope == "global":
            scope, origin = scope or "global", _TARGET
        if block is None:
            self._note("lerope", f"scope {scope}: not stated; {origin if scope else _TARGET}")
            if scope is None:
                return rope
        storage = block.storage if block is not None else None
        if storage is None:
            storage = target.lerope if target.lerope != "none" else "multiplier"
        return replace(rope, lerope=storage, lerope_scope=scope or "global")
