"""The tensors that a model of a given table must have: names, shapes and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ml4core.api import LayerSpec, ModelSpec
from ml4core.models.layer_table import DROPPED_ROPE_ROWS

Kind = Literal["matrix", "plain", "vector"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor of the table.

    Attributes:
        name: canonical name of its data.
        role: the weight of `LAYER_WEIGHTS` or `GLOBAL_WEIGHTS` that it becomes, or a part of it.
        shapes: what it may be; the first is the usual one.
        meaning: the shape in words of params.json.
        kind: `matrix` may be quantised, `plain` is a matrix that may not, `vector` the rest.
        used: False for what may be there, and is then left unread.
    """

    name: str
    role: str
    shapes: tuple[Shape, ...]
    meaning: str
    kind: Kind = "matrix"
    layer: int | None = None
    used: bool = True


def expected_tensors(spec: ModelSpec) -> dict[str, Expected]:
    """The decoder's tensors by canonical name, in the order in which they are loaded."""
    table = {entry.name: entry for entry in _outer(spec)}
    rows = spec.extras.get(DROPPED_ROPE_ROWS, 0)
    dropped = rows if isinstance(rows, int) else 0
    for layer in spec.layers:
        table |= {entry.name: entry for entry in _Layer(layer, dropped).entries()}
    return table


def learned_rope_dim(spec: ModelSpec) -> int:
    """Rotary width whose learned frequencies all layers share; 0 if there are none."""
    return next(
        (
            layer.rope.dim
            for layer in spec.layers
            if layer.rope is not None
            and layer.rope.lerope != "none"
            and layer.rope.lerope_scope == "global"
        ),
        0,
    )


def _outer(spec: ModelSpec) -> Iterator[Expected]:
    wide = ((spec.vocab_size, spec.hidden_size),)
    yield Expected("tok_embeddings.weight", "embedding", wide, "vocab_size x dim", "plain")
    yield Expected("norm.weight", "final_norm", ((spec.hidden_size,),), "dim", "vector")
    if not spec.tied_embeddings:
        yield Expected("output.weight", "output", wide, "vocab_size x dim")
    if rope_dim := learned_rope_dim(spec):
        shapes = ((rope_dim // 2,),)
        yield Expected("rope_freqs", "inv_freq", shapes, "qk_rope_head_dim / 2", "vector")


class _Layer:
    """The tensors of one layer."""

    def __init__(self, layer: LayerSpec, dropped_rope_rows: int) -> None:
        self.layer = layer
        self.dropped_rope_rows = dropped_rope_rows

    def entries(self) -> Iterator[Expected]:
        hidden = self.layer.hidden_size
        yield self._vector("attention_norm.weight", "attention_norm", hidden, "dim")
        yield from self._query()
        yield from self._latent()
        yield from self._attention_extras()
        if self.layer.indexer is not None:
            yield from self._indexer()
        yield self._vector("ffn_norm.weight", "ffn_norm", hidden, "dim")
        yield from self._moe() if self.layer.moe is not None else self._dense()

    def _matrix(
        self, name: str, role: str, rows: int, columns: int, meaning: str, kind: Kind = "matrix"
    ) -> Expected:
        index = self.layer.index
        shapes = ((rows, columns),)
        return Expected(f"layers.{index}.{name}", role, shapes, meaning, kind, index)

    def _vector(self, name: str, role: str, size: int, meaning: str) -> Expected:
        index = self.layer.index
        return Expected(f"layers.{index}.{name}", role, ((size,),), meaning, "vector", index)

    def _query(self) -> Iterator[Expected]:
        layer, hidden = self.layer, self.layer.hidden_size
        rows = layer.heads * layer.q_dim
        heads = f"n_heads {layer.heads} * (q.k dims {layer.nope_dim} + rope {layer.rope_dim})"
        if (rank := layer.q_lora_rank) is None:
            yield self._matrix("attention.wq.weight", "wq", rows, hidden, f"{heads} x dim")
            return
        yield self._matrix("attention.wq_a.weight", "wq_a", rank, hidden, "q_lora_rank x dim")
        yield self._vector("attention.q_a_norm.weight", "q_a_norm", rank, "q_lora_rank")
        yield self._matrix("attention.wq_b.weight", "wq_b", rows, rank, f"{heads} x q_lora_rank")

    def _latent(self) -> Iterator[Expected]:
        layer, rank = self.layer, self.layer.kv_lora_rank
        rope = layer.rope_dim
        if not layer.rope_dim:
            rope = self.dropped_rope_rows
        wide = self._matrix(
            "attention.wkv_a_with_mqa.weight",
            "wkv_a",
            rank + rope,
            layer.hidden_size,
            f"(kv_lora_rank {rank} + rope {rope}) x dim",
        )
        norm = self._vector("attention.kv_a_norm.weight", "kv_a_norm", rank, "kv_lora_rank")
        if layer.owns_kv:
            yield wide
            yield norm
        else:
            # A consumer may bring them along. Nothing reads them, so their shape is free.
            for entry in (wide, norm):
                yield Expected(entry.name, "", (), "", entry.kind, layer.index, used=False)
        yield self._matrix(
            "attention.wkv_b.weight",
            "w_uk, w_uv",
            layer.heads * (layer.nope_dim + layer.v_dim),
            rank,
            f"n_heads {layer.heads} * (q.k dims {layer.nope_dim} + v_head_dim {layer.v_dim}) "
            "x kv_lora_rank",
        )
        yield self._matrix(
            "attention.wo.weight",
            "wo",
            layer.hidden_size,
            layer.heads * layer.v_dim,
            f"dim x n_heads {layer.heads} * v_head_dim {layer.v_dim}",
        )

    def _attention_extras(self) -> Iterator[Expected]:
        layer = self.layer
        rope = layer.rope
        if rope is not None and rope.lerope != "none" and rope.lerope_scope == "layer":
            half, meaning = rope.dim // 2, "qk_rope_head_dim / 2"
            yield self._vector("attention.rope_freqs", "inv_freq", half, meaning)
        if layer.ssmax.per_head:
            yield self._vector("attention.ssmax_scale", "ssmax_scale", layer.heads, "n_heads")
        if layer.ssmax.bias:
            yield self._vector("attention.ssmax_bias", "ssmax_bias", layer.heads, "n_heads")

    def _indexer(self) -> Iterator[Expected]:
        layer, indexer = self.layer, self.layer.indexer
        assert indexer is not None
        heads, dim, hidden = indexer.heads, indexer.head_dim, layer.hidden_size
        width, source = hidden, "dim"
        if indexer.query_input == "q_lora":
            assert layer.q_lora_rank is not None  # by the checks of params.json
            width, source = layer.q_lora_rank, "q_lora_rank"
        prefix = "attention.indexer."
        meaning = f"indexer.n_heads {heads} * indexer.head_dim {dim} x {source}"
        yield self._matrix(prefix + "wq.weight", "index_wq", heads * dim, width, meaning)
        if indexer.query_norm:
            for part in ("weight", "bias"):
                name = f"layers.{layer.index}.{prefix}q_norm.{part}"
                shapes = ((dim,), (heads * dim,), (heads, dim))
                meaning = "indexer.head_dim, or indexer.n_heads * indexer.head_dim"
                role = f"index_q_norm_{part}"
                yield Expected(name, role, shapes, meaning, "vector", layer.index)
        meaning = "indexer.head_dim x dim"
        yield self._matrix(prefix + "wk.weight", "index_wk", dim, hidden, meaning)
        for part in ("weight", "bias"):
            role = f"index_k_norm_{part}"
            yield self._vector(prefix + f"k_norm.{part}", role, dim, "indexer.head_dim")
        name, role = prefix + "weights_proj.weight", "index_weights_proj"
        yield self._matrix(name, role, heads, hidden, "indexer.n_heads x dim")
        for part, there in (("scale", indexer.ssmax.per_head), ("bias", indexer.ssmax.bias)):
            if there:
                role = f"index_ssmax_{part}"
                yield self._vector(prefix + f"ssmax_{part}", role, heads, "indexer.n_heads")

    def _dense(self) -> Iterator[Expected]:
        width = self.layer.dense_width
        assert width is not None  # a layer is dense or MoE
        yield from self._swiglu("feed_forward", "dense", width, "hidden_dim")

    def _moe(self) -> Iterator[Expected]:
        moe = self.layer.moe
        assert moe is not None
        hidden = self.layer.hidden_size
        yield self._matrix(
            "gate.weight", "gate", moe.experts, hidden, "moe.num_experts x dim", "plain"
        )
        for expert in range(moe.experts):
            prefix = f"experts.{expert}"
            yield from self._swiglu(prefix, "experts", moe.expert_width, "moe.expert_hidden_dim")
        if moe.shared_width:
            width = "shared experts' width"
            yield from self._swiglu("shared_experts", "shared", moe.shared_width, width)

    def _swiglu(self, prefix: str, role: str, width: int, meaning: str) -> Iterator[Expected]:
        hidden = self.layer.hidden_size
        for part in ("w1", "w3"):
            name = f"{prefix}.{part}.weight"
            yield self._matrix(name, f"{role}_w13", width, hidden, f"{meaning} x dim")
        name = f"{prefix}.w2.weight"
        yield self._matrix(name, f"{role}_w2", hidden, width, f"dim x {meaning}")
