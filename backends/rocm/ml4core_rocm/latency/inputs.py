"""What the kernel is given: each weight and cache as it expects it, or a reason that names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ml4core.api import KVCache, LayerSpec, Refusal, Weight
from ml4core_rocm.latency.guards import BLOCK_SIZE, INDEX_LAYOUT, KV_LAYOUTS, LEAVE_OUT, WORD

Wanted = tuple[tuple[int, ...], tuple[str, ...]]
"""Shape, and the formats that are read; those of a tensor are dtypes."""

_ANY = ("fp8_block", "bf16")
_NORM = ("bfloat16", "float32")
_FP32 = ("float32",)
_QUERY_NORM = "index_q_norm_"


def wanted(layer: LayerSpec) -> Mapping[str, Wanted]:
    """The weights of a MoE layer as one rank has them: ``layer`` is that rank's."""
    moe, index = layer.moe, layer.indexer
    if moe is None:
        raise ValueError(f"layer {layer.index} is dense, and no part of the specialised decode")
    hidden, heads, latent = layer.hidden_size, layer.heads, layer.kv_lora_rank
    width, shared = moe.expert_width, moe.shared_width
    found: dict[str, Wanted] = {
        "attention_norm": ((hidden,), _NORM),
        "ffn_norm": ((hidden,), _NORM),
        "wq": ((heads * layer.q_dim, hidden), _ANY),
        "w_uk": ((heads, latent, layer.nope_dim), ("bf16",)),
        "w_uv": ((heads, layer.v_dim, latent), ("bf16",)),
        "wo": ((hidden, heads * layer.v_dim), _ANY),
        "gate": ((moe.experts, hidden), _FP32),
        "experts_w13": ((moe.experts, 2 * width, hidden), ("mxfp4",)),
        "experts_w2": ((moe.experts, hidden, width), ("mxfp4",)),
    }
    if shared:
        found["shared_w13"] = ((2 * shared, hidden), _ANY)
        found["shared_w2"] = ((hidden, shared), _ANY)
    if layer.owns_kv:
        found["wkv_a"] = ((latent + layer.rope_dim, hidden), _ANY)
        found["kv_a_norm"] = ((latent,), _NORM)
    if index is not None:
        found["index_wq"] = ((index.heads * index.head_dim, hidden), _ANY)
        found["index_wk"] = ((index.head_dim, hidden), _ANY)
        found["index_weights_proj"] = ((index.heads, hidden), ("fp32",))
        for part in ("weight", "bias"):
            found[f"index_k_norm_{part}"] = ((index.head_dim,), _FP32)
            if index.query_norm:
                found[f"{_QUERY_NORM}{part}"] = ((index.heads, index.head_dim), _FP32)
    if layer.rope is not None:
        found["inv_freq"] = ((layer.rope_dim // 2,), _FP32)
    own = [("ssmax", heads, layer.ssmax)]
    own += [("index_ssmax", index.heads, index.ssmax)] if index is not None else []
    for name, count, ssmax in own:
        found |= {f"{name}_scale": ((count,), _FP32)} if ssmax.per_head else {}
        found |= {f"{name}_bias": ((count,), _FP32)} if ssmax.bias else {}
    return found


def weight_reasons(layer: LayerSpec, weights: Mapping[str, Tensor | Weight]) -> Iterator[Refusal]:
    """Each weight that is missing, or of another shape, format or order than the kernel reads."""
    for name, (shape, formats) in wanted(layer).items():
        value = weights.get(name)
        where = f"layer {layer.index}, {name}"
        if value is None:
            yield _no(where, "it is not there")
            continue
        format = value.format if isinstance(value, Weight) else str(value.dtype)[len("torch.") :]
        # The norm of index queries is each head's own, or that of all.
        shared = name.startswith(_QUERY_NORM) and tuple(value.shape) == shape[1:]
        if tuple(value.shape) != shape and not shared:
            yield _no(where, f"its shape is {list(value.shape)}, not {list(shape)}")
        if format not in formats:
            yield _no(where, f"it is {format}, not {' or '.join(formats)}")
        parts = value.parts if isinstance(value, Weight) else {"data": value}
        for part, tensor in parts.items():
            if not tensor.is_contiguous():
                yield _no(where, f"its {part} is not contiguous: strides {tensor.stride()}")


def cache_reasons(name: str, cache: KVCache) -> Iterator[Refusal]:
    """What is wrong with a layer's cache, ``latent`` or ``index``."""
    layouts = KV_LAYOUTS if cache.layout.role == "latent" else (INDEX_LAYOUT,)
    if cache.layout.id not in layouts:
        yield _no(name, f"its layout is {cache.layout.id}, not {' or '.join(layouts)}")
    if cache.block_size != BLOCK_SIZE:
        yield _no(name, f"its pages are of {cache.block_size} tokens, not of {BLOCK_SIZE}")
    if any(not part.is_contiguous() for part in cache.parts):
        yield _no(name, "its pages are not dense")
    if cache.layout.fp8 and cache.layout.role == "latent":
        scale = cache.scale
        if scale is None or scale.dtype != torch.float32 or scale.numel() != 1:
            yield _no(name, "it has no scale of one fp32 number")


def addresses(*caches: KVCache) -> tuple[int, ...]:
    """What tells these caches from others that are bound in their place."""
    return tuple(part.data_ptr() for cache in caches for part in cache.parts)


def _no(name: str, reason: str) -> Refusal:
    return Refusal("rocm", f"{WORD}, {name}", reason, LEAVE_OUT)
