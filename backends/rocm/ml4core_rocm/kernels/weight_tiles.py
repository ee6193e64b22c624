"""Tiles of weights in every open format.

A tile is [BN, 128] of a matrix [N, K], the inner axis contiguous. Codes are exact in bf16: e4m3 has
4 significant bits, an e2m1 code times an e4m3 or e8m0 group scale 6 at most. The scales of
``fp8_block`` multiply a tile's sums, those of ``fp8_tensor`` and of NVFP4's rows the whole sum, in
fp32. FP4 tiles come as two, of the even and of the odd columns (a byte's low and high nibble): the
activation is read as two such halves, so that nothing is shuffled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import Weight
from ml4core_rocm.kernels.numeric import decoded, e2m1, e8m0, fp8, narrow, widen

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
_FP8_BLOCK, _FP8_TENSOR = tl.constexpr(FP8_BLOCK), tl.constexpr(FP8_TENSOR)
_NVFP4 = tl.constexpr(NVFP4)
_TILE = tl.constexpr(K_TILE)


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
def packed_tile(data, rows, row_fits, k0, K, WIDTH: tl.constexpr):
    """Bytes uint8 [BN, WIDTH / 2] of ``WIDTH`` FP4 columns from k0 on."""
    byte = k0 // 2 + tl.arange(0, WIDTH // 2)
    where = data + rows.to(tl.int64)[:, None] * (K // 2) + byte[None, :]
    return tl.load(where, mask=row_fits[:, None] & (byte < K // 2)[None, :], other=0)


@triton.jit
def group_bytes(scale, rows, row_fits, k0, K, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Scales uint8 [BN, WIDTH / GROUP] of these columns; 0 behind K."""
    group = k0 // GROUP + tl.arange(0, WIDTH // GROUP)
    where = scale + rows.to(tl.int64)[:, None] * (K // GROUP) + group[None, :]
    return tl.load(where, mask=row_fits[:, None] & (group < K // GROUP)[None, :], other=0)


@triton.jit
def fp4_tile(
    data, scale, rows, row_fits, k0, K, BN: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr
):
    """The even and the odd columns of a tile, [BN, 64] each, group scales included, in ``WIDE``:
    bf16 or fp32.
    """
    GROUP: tl.constexpr = 16 if FORMAT == _NVFP4 else 32
    codes = packed_tile(data, rows, row_fits, k0, K, _TILE).to(tl.int32)
    each = group_bytes(scale, rows, row_fits, k0, K, GROUP, _TILE)
    factor = decoded(each, tl.float32, False) if FORMAT == _NVFP4 else e8m0(each.to(tl.int32))
    spread = tl.broadcast_to(factor[:, :, None], (BN, _TILE // GROUP, GROUP // 2))
    spread = tl.reshape(spread, (BN, _TILE // 2))
    return narrow(e2m1(codes) * spread, WIDE), narrow(e2m1(codes >> 4) * spread, WIDE)


@triton.jit
def plain_tile(
    data, rows, row_fits, k0, K, FORMAT: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr
):
    """A tile [BN, 128] of any other format, its block's or matrix' scale left out; as FP8 operands
    with ``CODES``.
    """
    columns = k0 + tl.arange(0, _TILE)
    where = data + rows.to(tl.int64)[:, None] * K + columns[None, :]
    fits = row_fits[:, None] & (columns < K)[None, :]
    stored = tl.load(where, mask=fits, other=0)
    if FORMAT < _FP8_BLOCK:
        found = stored if stored.dtype == WIDE else narrow(widen(stored), WIDE)
    elif CODES:
        found = fp8(stored, False)
    else:
        found = decoded(stored, WIDE, False)
    return found


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
