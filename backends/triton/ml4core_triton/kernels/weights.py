"""Weights as the kernels of products take them, in every open format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import Weight

K_TILE = 128
"""Columns of a tile: one block of scales."""

FP32, BF16, FP8_BLOCK, FP8_TENSOR, NVFP4, MXFP4 = range(6)
FORMATS: Mapping[str, int] = MappingProxyType(
    {
        "fp32": FP32,
        "bf16": BF16,
        "fp8_block": FP8_BLOCK,
        "fp8_tensor": FP8_TENSOR,
        "nvfp4": NVFP4,
        "mxfp4": MXFP4,
    }
)
FORMAT_NAMES = tuple(FORMATS)
"""By number."""

_FP8_TENSOR, _NVFP4 = tl.constexpr(FP8_TENSOR), tl.constexpr(NVFP4)


@dataclass(frozen=True)
class WeightArgs:
    """A weight as a kernel takes it: contiguous parts, and a number for its format.

    Attributes:
        scale, row_scale: the data itself where the format has none, so that a pointer is there.
        matrices: 1 for a single matrix [N, K].
        scale_size: scales of one matrix.
    """

    format: int
    data: Tensor
    scale: Tensor
    row_scale: Tensor
    matrices: int
    rows: int
    columns: int
    scale_size: int

    @property
    def bits(self) -> float:
        """Stored bits an element, scales included."""
        return {FP32: 32, BF16: 16, NVFP4: 4.5, MXFP4: 4.25}.get(self.format, 8)


def weight_args(weight: Weight) -> WeightArgs:
    """``ValueError`` for a format that isn't open, or an inner axis that its groups don't fill."""
    if weight.format not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"products take weights of {known}; this one is {weight.format!r}")
    group = {"nvfp4": 16, "mxfp4": 32}.get(weight.format, 1)
    *stack, rows, columns = weight.shape
    if columns % group:
        raise ValueError(
            f"{weight.format} has groups of {group} columns, and {columns} are no multiple of it"
        )
    parts = {name: part.contiguous() for name, part in weight.parts.items()}
    data = parts["data"]
    scale = parts.get("scale", data)
    matrices = 1
    for size in stack:
        matrices *= size
    return WeightArgs(
        FORMATS[weight.format],
        data,
        scale,
        parts.get("global_scale", data),
        matrices,
        rows,
        columns,
        scale.numel() // max(1, matrices) if "scale" in parts else 0,
    )


def is_fp4(format: int) -> bool:
    return format in (NVFP4, MXFP4)


def product_args(x: Tensor, weight: Weight) -> WeightArgs:
    """A weight [N, K] for ``gemm`` with ``x`` [T, K]. ``ValueError`` for other shapes."""
    args = weight_args(weight)
    if x.dim() != 2 or len(weight.shape) != 2 or x.shape[1] != args.columns:
        raise ValueError(
            f"gemm takes x [T, K] and a weight [N, K]; got x {list(x.shape)} and a weight "
            f"{list(weight.shape)}"
        )
    return args


def head_args(x: Tensor, weight: Weight) -> WeightArgs:
    """A weight [N, B, A] for ``head_gemm`` with ``x`` [T, N, A]. ``ValueError`` for other
    shapes.
    """
    args = weight_args(weight)
    if x.dim() != 3 or len(weight.shape) != 3 or x.shape[1:] != (args.matrices, args.columns):
        raise ValueError(
            f"head_gemm takes x [T, N, A] and a weight [N, B, A]; got x {list(x.shape)} and a "
            f"weight {list(weight.shape)}"
        )
    return args


def check_experts(x: Tensor, w13: WeightArgs, w2: WeightArgs, weights: Tensor, ids: Tensor) -> None:
    """``ValueError`` for shapes that don't belong together in ``moe_experts``."""
    width, inner = x.shape[-1], w2.columns
    fits = (
        x.dim() == 2
        and ids.shape == weights.shape
        and ids.shape[:1] == x.shape[:1]
        and (w13.rows, w13.columns) == (2 * inner, width)
        and w2.rows == width
        and w13.matrices == w2.matrices
    )
    if not fits:
        raise ValueError(
            f"moe_experts takes x [T, H], w13 [E, 2I, H], w2 [E, H, I], weights and ids [T, topk]; "
            f"got x {list(x.shape)}, w13 {[w13.matrices, w13.rows, w13.columns]}, w2 "
            f"{[w2.matrices, w2.rows, w2.columns]}, weights {list(weights.shape)}, ids "
            f"{list(ids.shape)}"
        )


@triton.jit
def matrix_of(
    data,
    scale,
    row_scale,
    matrix,
    N,
    K,
    scale_size,
    FORMAT: tl.constexpr,
):
    """Where matrix number ``matrix`` int64 of a stack begins: its data, scales and row scales."""
    STORED: tl.constexpr = 2 if FORMAT >= _NVFP4 else 1
    return (
        data + matrix * N * (K // STORED),
        scale + matrix * scale_size,
        row_scale + matrix * N,
    )


@triton.jit
def whole_scale(scale, row_scale, rows, row_fits, FORMAT: tl.constexpr, BN: tl.constexpr):
    """What whole sums of rows [BN] are multiplied by, fp32 [BN]; ``scale`` is the matrix' own."""
    if FORMAT == _FP8_TENSOR:
        found = tl.load(scale) + tl.zeros([BN], tl.float32)
    elif FORMAT == _NVFP4:
        found = tl.load(row_scale + rows, mask=row_fits, other=0.0)
    else:
        found = tl.full([BN], 1.0, tl.float32)
    return found
