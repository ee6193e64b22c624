"""A checkpoint's weights as a backend receives them, one layer after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from ml4core.api import IndexerSpec, LayerSpec, ModelSpec, MoESpec, Weight
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.rope_freqs import inv_freq
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
) -> Iterator[tuple[LayerSpec | None, Weights]]:
    """The weights of `GLOBAL_WEIGHTS` with layer None, then those of `LAYER_WEIGHTS` of each layer.

    All tensors are compared with the table first, at the call; `report` is what `validate` gave, if
    that is known already. Matrices keep the checkpoint's format: bf16, fp32 (fp16 too becomes fp32)
    or fp8_block. FP8 that can't stay FP8 (W_UK and W_UV; w1 over w3 where a part ends within a
    block) is decoded to `dtype`, float32 or bfloat16.

    Nothing that was handed out is kept, so memory is what the caller holds plus one layer, if the
    caller drops a layer before it asks for the next. `progress(done, total)` counts bytes.

    Raises CheckpointError.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype {dtype}; weights are decoded to torch.float32 or torch.bfloat16")
    report = validate(checkpoint, spec) if report is None else report
    return _load(Loader(spec, WeightReader(checkpoint, report, dtype, progress)))


def _load(loader: Loader) -> Iterator[tuple[LayerSpec | None, Weights]]:
    # No local name for what is yielded: it would keep one layer alive while the next is read.
    yield None, loader.top()
    for layer in loader.spec.layers:
        yield layer, loader.layer(layer)


class Loader:
    """Reads weights of `spec`. Stems begin with `prefix`; `learned` [R/2] are the frequencies that
    all layers share, which `top` reads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        reader: WeightReader,
        prefix: str = "",
        learned: Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.reader = reader
        self.prefix = prefix
        self.learned = learned

    def top(self) -> Weights:
        read = self.reader
        if any(_learned(layer) == "global" for layer in self.spec.layers):
            self.learned = read.vector("rope_freqs", torch.float32)
        embedding = read.matrix("tok_embeddings")
        return {
            "embedding": embedding.data,
            "final_norm": read.vector("norm.weight"),
            "output": embedding if self.spec.tied_embeddings else read.matrix("output"),
        }

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
            weights["wq"] = read.matrix(prefix + "wq")
        else:
            weights["wq_a"] = read.matrix(prefix + "wq_a")
            weights["q_a_norm"] = read.vector(prefix + "q_a_norm.weight")
            weights["wq_b"] = read.matrix(prefix + "wq_b")
        if layer.owns_kv:
            # Rows beyond these, of a rope part that a NoPE layer has no use for, are not read.
            rows = layer.kv_lora_rank + layer.rope_dim
            weights["wkv_a"] = read.matrix(prefix + "wkv_a_with_mqa", rows)
            weights["kv_a_norm"] = read.vector(prefix + "kv_a_norm.weight")
        weights |= self._absorbed(layer, prefix + "wkv_b")
        weights["wo"] = read.matrix(prefix + "wo")
        if layer.rope is not None:
            weights["inv_freq"] = self._inv_freq(layer, prefix)
        if layer.ssmax.per_head:
            weights["ssmax_scale"] = read.vector(prefix + "ssmax_scale", torch.float32)
        if layer.ssmax.bias:
            weights["ssmax_bias"] = read.vector(prefix + "ssmax_bias", torch.float32)
        return weights

    def _absorbed(self, layer: LayerSpec, stem: str) -> Weights:
        """wkv_b [N (P+V), L], P rows before V rows in each head, as its two halves by head."""
        heads = self.reader.dense(stem).unflatten(0, (layer.heads, -1))  # [N, P+V, L]
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
            raise CheckpointError(f"{name}: {error}") from error

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
        experts = [f"{prefix}experts.{expert}" for expert in range(moe.experts)]
        weights: Weights = {
            "gate": self.reader.dense(prefix + "gate", "fp32"),
            "experts_w13": self.reader.stacks([(f"{e}.w1", f"{e}.w3") for e in experts]),
            "experts_w2": self.reader.stacks([(f"{e}.w2",) for e in experts]),
        }
        if moe.shared_width:
            weights |= self._swiglu("shared", prefix + "shared_experts")
        return weights

    def _swiglu(self, name: str, stem: str) -> Weights:
        return {
            f"{name}_w13": self.reader.stacked((f"{stem}.w1", f"{stem}.w3")),
            f"{name}_w2": self.reader.matrix(f"{stem}.w2"),
        }


def _learned(layer: LayerSpec) -> str | None:
    """The scope of the layer's learned frequencies, None if it has none."""
    if layer.rope is None or layer.rope.lerope == "none":
        return None
    return layer.rope.lerope_scope
