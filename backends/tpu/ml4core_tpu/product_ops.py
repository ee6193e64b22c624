"""The backend's products, with the contracts of ``ml4core.api.OPS``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ml4core.api import Weight

PACKED = "x-ml4core-tpu/"
"""How formats of packed experts begin; the open format's name follows."""
_FP8_BLOCK = 128
GROUPS: Mapping[str, int] = MappingProxyType({"nvfp4": 16, "mxfp4": 32})
"""FP4 formats, and the columns that a scale serves."""


def gemm(
    x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None, *, act: str | None = None
) -> Tensor:
    """``act``: ``fp8_tensor`` where inputs of FP8 weights are quantised first, a scale a row."""
    from ml4core_tpu import torch_products

    dtype = out_dtype or x.dtype
    if not x.numel():
        return x.new_zeros(x.shape[0], weight.shape[0], dtype=dtype)
    if weight.format in ("fp8_block", "fp8_tensor"):
        quantize = act == "fp8_tensor" and _is_bf16(x)
        return torch_products.fp8_matmul(x, weight.data, weight.parts["scale"], dtype, quantize)
    return torch_products.wide_matmul(x, _decoded(weight), dtype)


def router(
    x: Tensor, weight: Tensor, topk: int, renormalize: bool, routed_scale: float
) -> tuple[Tensor, Tensor]:
    from ml4core_tpu import torch_products

    if not x.shape[0]:
        found = x.new_empty(0, topk)
        return found.float(), found.long()
    return torch_products.router(x, weight, topk, renormalize, float(routed_scale))


def moe_experts(
    x: Tensor,
    w13: Weight,
    w2: Weight,
    weights: Tensor,
    ids: Tensor,
    first_expert: int = 0,
    *,
    act: str | None = None,
) -> Tensor:
    """FP4 experts meet plain inputs, and FP8 ones such or rounded ones; kernels decode them. Of
    other formats all are decoded first. ``act`` as in ``gemm``.
    """
    import torch

    from ml4core_tpu import torch_products

    if not x.shape[0] or not w13.shape[0]:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    given = (weights, ids, first_expert or 0)
    formats = {weight.format.removeprefix(PACKED) for weight in (w13, w2)}
    if len(formats) == 1 and formats <= GROUPS.keys():
        packed = (packed_weight(w13, 2), packed_weight(w2, 1))
        parts = ([*weight.parts.values()] for weight in packed)
        return torch_products.fp4_experts(x, *parts, *given, *formats)
    if formats <= {"fp8_block", "fp8_tensor"}:
        quantize = act == "fp8_tensor" and _is_bf16(x)
        return torch_products.fp8_experts(x, _fp8_blocks(w13), _fp8_blocks(w2), *given, quantize)
    return torch_products.wide_experts(x, _decoded(w13), _decoded(w2), *given)


def _fp8_blocks(weight: Weight) -> list[Tensor]:
    """Codes [E, N, K] and a scale for each block; of matrices that have one scale, that."""
    data, scale = weight.data, weight.parts["scale"]
    if weight.format == "fp8_tensor":
        held, rows, columns = data.shape
        blocks = (-(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK))
        scale = scale.reshape(-1, 1, 1).expand(held, *blocks).contiguous()
    return [data, scale.float()]


def packed_weight(weight: Weight, halves: int) -> Weight:
    """FP4 experts as their kernel reads them; of any other format as they are. ``halves`` as for
    ``packed_experts``.
    """
    if weight.format not in GROUPS:
        return weight
    from ml4core_tpu.expert_weights import packed_experts

    return packed_experts(weight, halves)


def _is_bf16(x: Tensor) -> bool:
    return str(x.dtype) == "torch.bfloat16"


def _decoded(weight: Weight) -> Tensor:
    """The values of a weight: as they are where it is plain, else fp32."""
    from ml4core.formats import fp8_block, fp8_tensor, mxfp4, nvfp4

    parts = weight.parts
    if weight.format in ("fp32", "bf16"):
        return weight.data
    if weight.format == "fp8_block":
        return fp8_block.dequantize_weight(weight.data, parts["scale"])
    if weight.format == "fp8_tensor":
        scale = parts["scale"].reshape(*weight.shape[:-2], 1, 1)
        return fp8_tensor.dequantize(weight.data, scale)
    if weight.format == "nvfp4":
        multiplier = parts["global_scale"].unsqueeze(-1)
        return nvfp4.dequantize(weight.data, parts["scale"], multiplier=multiplier)
    if weight.format == "mxfp4":
        return mxfp4.dequantize(weight.data, parts["scale"])
    raise ValueError(f"no product reads weights of format {weight.format!r}")
