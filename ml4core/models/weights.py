"""A checkpoint's weights as a backend receives them, one layer after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from ml4core.api import IndexerSpec, LayerSpec, ModelSpec, MoESpec, Weight
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.requant import Requant
from ml4core.models.rope_freqs import inv_freq
from ml4core.models.shard_check import check_shard
from ml4core.models.shards import WHOLE, Cut, Shard, padded_rows, shard_spec
from ml4core.models.tensors import TensorReport, validate
from ml4core.models.weight_reader import Progress, WeightReader

Weights: TypeAlias = dict[str, Tensor | Weight]


def load_layers(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: torch.dtype = torch.bfloat16,
    *,
    progress: Progress | None = None,
    report: TensorReport | None = None,
    shard: Shard | None = None,
    requant: Requant | None = None,
) -> Iterator[tuple[LayerSpec | None, Weights]]:
    """The weights of `GLOBAL_WEIGHTS` with layer None, then those of `LAYER_WEIGHTS` of each layer.

    All tensors are compared with the table first, at the call; `report` is what `validate` gave, if
    that is known already. Matrices keep the checkpoint's format (fp16 becomes fp32). What can't
    stay quantised is decoded to `dtype`, float32 or bfloat16: W_UK and W_UV, w1 over w3 where a
    part ends within a block, and stacks of experts in several formats.

    With `shard`, `spec` is still the whole model's; the layers that are given are those of
    `shard_spec`, and of each tensor only what this rank has is read. With `requant`, routed experts
    in FP8 become MXFP4 as they are read.

    Nothing that was handed out is kept, so memory is what the caller holds plus one layer, if the
    caller drops a layer before it asks for the next. `progress(done, total)` counts bytes.

    Raises CheckpointError: for the tensors, and for every one that can't be cut as `shard` asks, on
    all ranks alike, before anything is read.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype {dtype}; weights are decoded to torch.float32 or torch.bfloat16")
    report = validate(checkpoint, spec) if report is None else report
    shard = shard or WHOLE
    check_shard(f"{checkpoint.path}", spec, report, shard, requant is not None)
    reader = WeightReader(checkpoint, report, dtype, progress, requant)
    loader = Loader(spec, reader, shard=shard)
    return _load(loader, shard_spec(spec, shard))


def _load(loader: Loader, local: ModelSpec) -> Iterator[tuple[LayerSpec | None, Weights]]:
    # No local name for what is yielded: it would keep one layer alive while the next is read.
    yield None, loader.top()
    for layer, here in zip(loader.spec.layers, local.layers, strict=True):
        yield here, loader.layer(layer)


class Loader:
    """Reads weights of `spec`, the whole model's, as `shard` has them. Stems begin with `prefix`;
    `learned` [R/2] are the frequencies that all layers share, which `top` reads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        reader: WeightReader,
        prefix: str = "",
        learned: Tensor | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.spec = spec
        self.reader = reader
        self.prefix = prefix
        self.learned = learned
        self.shard = shard

    def top(self) -> Weights:
        read = self.reader
        if any(_learned(layer) == "global" for layer in self.spec.layers):
            self.learned = read.vector("rope_freqs", torch.float32)
        embedding = self._vocab("tok_embeddings")
        return {
            "embedding": embedding.data,
            "final_norm": read.vector("norm.weight"),
            "output": embedding if self.spec.tied_embeddings else self._vocab("output"),
        }

    def _vocab(self, stem: str) -> Weight:
        """This rank's tokens, and rows of zeros behind them."""
        start, stop, rows = self.shard.vocab(self.spec.vocab_size)
        weight = self.reader.matrix(stem, Cut(rows=(start, stop)))
        if stop - start == rows:
            return weight
        return padded_rows(weight, rows)

    def _matrix(self, role: str, stem: str) -> Weight:
        return self.reader.matrix(stem, self.shard.cut(role, self.reader.shape(stem)))

    def layer(self, layer: LayerSpec) -> Weights:
        prefix = f"{self.prefix}layers.{layer.index}."
        weights: Weights = {
            name: self.reader.vector(f"{prefix}{name}.weight")
            for name in ("attention_norm", "ffn_norm")
        }
        weights |= self._attention(layer, prefix + "attention.")
        if layer.indexer is not None:
            weights |= self._indexer(layer.indexer, prefix + "attention.indexer.")
        if layer.moe is not None:
            return weights | self._moe(layer.moe, prefix)
        return weights | self._swiglu("dense", prefix + "feed_forward")

    def _attention(self, layer: LayerSpec, prefix: str) -> Weights:
        read = self.reader
        weights: Weights = {}
        if layer.q_lora_rank is None:
            weights["wq"] = self._matrix("wq", prefix + "wq")
        else:
            weights["wq_a"] = read.matrix(prefix + "wq_a")
            weights["q_a_norm"] = read.vector(prefix + "q_a_norm.weight")
            weights["wq_b"] = self._matrix("wq_b", prefix + "wq_b")
        if layer.owns_kv:
            # Rows beyond these, of a rope part that a NoPE layer has no use for, are not read.
            rows = layer.kv_lora_rank + layer.rope_dim
            weights["wkv_a"] = read.matrix(prefix + "wkv_a_with_mqa", Cut(rows=(0, rows)))
            weights["kv_a_norm"] = read.vector(prefix + "kv_a_norm.weight")
        weights |= self._absorbed(layer, prefix + "wkv_b")
        weights["wo"] = self._matrix("wo", prefix + "wo")
        if layer.rope is not None:
            weights["inv_freq"] = self._inv_freq(layer, prefix)
        for name, there in (
            ("ssmax_scale", layer.ssmax.per_head),
            ("ssmax_bias", layer.ssmax.bias),
        ):
            if there:
                rows_here = self.shard.cut(name, (layer.heads,)).rows
                weights[name] = read.vector(prefix + name, torch.float32, rows_here)
        return weights

    def _absorbed(self, layer: LayerSpec, stem: str) -> Weights:
        """wkv_b [N (P+V), L], P rows before V rows in each head, as its two halves by head."""
        cut = self.shard.cut("w_uk, w_uv", self.reader.shape(stem))
        rows = self.reader.dense(stem, cut=cut)
        heads = rows.unflatten(0, (-1, layer.nope_dim + layer.v_dim))  # [N, P+V, L]
        up_k, up_v = heads.split([layer.nope_dim, layer.v_dim], dim=1)
        layout = torch.contiguous_format  # copies: a view would keep the whole of wkv_b
        halves = {
            "w_uk": up_k.transpose(1, 2).clone(memory_format=layout),
            "w_uv": up_v.clone(memory_format=layout),
        }
        format = "bf16" if heads.dtype == torch.bfloat16 else "fp32"
        return {
            name: Weight(format, tuple(half.shape), {"data": half}) for name, half in halves.items()
        }

    def _inv_freq(self, layer: LayerSpec, prefix: str) -> Tensor:
        assert layer.rope is not None
        learned, name = None, "rope_freqs"
        if _learned(layer) == "global":
            learned = self.learned
        elif _learned(layer) == "layer":
            name = prefix + "rope_freqs"
            learned = self.reader.vector(name, torch.float32)
        try:
            return inv_freq(layer.rope, learned)
        except ValueError as error:
            raise CheckpointError(f"{self.reader.place(name)}: {error}") from error

    def _indexer(self, indexer: IndexerSpec, prefix: str) -> Weights:
        read, fp32 = self.reader, torch.float32
        proj = read.dense(prefix + "weights_proj", "fp32")
        weights: Weights = {
            "index_wq": read.matrix(prefix + "wq"),
            "index_wk": read.matrix(prefix + "wk"),
            "index_k_norm_weight": read.vector(prefix + "k_norm.weight", fp32),
            "index_k_norm_bias": read.vector(prefix + "k_norm.bias", fp32),
            "index_weights_proj": Weight("fp32", tuple(proj.shape), {"data": proj}),
        }
        if indexer.query_norm:
            for part in ("weight", "bias"):
                norm = read.vector(f"{prefix}q_norm.{part}", fp32)
                shared = norm.numel() == indexer.head_dim  # by all heads
                shape = (-1,) if shared else (indexer.heads, indexer.head_dim)
                weights[f"index_q_norm_{part}"] = norm.reshape(shape)
        if indexer.ssmax.per_head:
            weights["index_ssmax_scale"] = read.vector(prefix + "ssmax_scale", fp32)
        if indexer.ssmax.bias:
            weights["index_ssmax_bias"] = read.vector(prefix + "ssmax_bias", fp32)
        return weights

    def _moe(self, moe: MoESpec, prefix: str) -> Weights:
        everywhere = [f"{prefix}experts.{expert}" for expert in range(moe.experts)]
        here = self.shard.experts(moe.experts)
        weights: Weights = {"gate": self.reader.dense(prefix + "gate", "fp32")}
        for name, parts in (("experts_w13", ("w1", "w3")), ("experts_w2", ("w2",))):
            groups = [[f"{expert}.{part}" for part in parts] for expert in everywhere]
            cut = self.shard.cut(name, self.reader.shape(groups[0][0]))
            # Activation scales are all experts' on every rank: kernels may want the largest.
            if (scales := self.reader.input_scales(groups)) is not None:
                weights[f"{name}_input_scale"] = scales
            for group in (*groups[: here.start], *groups[here.stop :]):
                self.reader.passed_over(group)
            weights[name] = self.reader.experts(groups[here.start : here.stop], cut)
        if moe.shared_width:
            weights |= self._swiglu("shared", prefix + "shared_experts")
        return weights

    def _swiglu(self, name: str, stem: str) -> Weights:
        cut = self.shard.cut(f"{name}_w13", self.reader.shape(f"{stem}.w1"))
        return {
            f"{name}_w13": self.reader.stacked((f"{stem}.w1", f"{stem}.w3"), cut),
            f"{name}_w2": self._matrix(f"{name}_w2", f"{stem}.w2"),
        }


def _learned(layer: LayerSpec) -> str | None:
    """The scope of the layer's learned frequencies, None if it has none."""
    if layer.rope is None or layer.rope.lerope == "none":
        return None
    return layer.rope.lerope_scope
