"""Tiles of weights in every open format, decoded to what products take without a rounding.

A tile is [BN, 128] of a matrix [N, K], the inner axis contiguous. What the matrix units get is the
code, in bf16 (or fp32 beside fp32 activations): e4m3 has 4 significant bits, an e2m1 code times an
e4m3 or e8m0 group scale 6 at most, so each is exact there. The scales of ``fp8_block`` multiply a
tile's sum, those of ``fp8_tensor`` and of NVFP4's rows the whole sum, in fp32.

FP4 tiles come as two, of the even and of the odd columns (a byte's low and high nibble); the
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
from ml4core_cuda.kernels.numeric import e2m1_pairs, e4m3, e8m0, widen

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

_FP32, _BF16 = tl.constexpr(FP32), tl.constexpr(BF16)
_FP8_BLOCK, _FP8_TENSOR = tl.constexpr(FP8_BLOCK), tl.constexpr(FP8_TENSOR)
_NVFP4, _MXFP4 = tl.constexpr(NVFP4), tl.constexpr(MXFP4)
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


@triton.jit
def _fp4_codes(data, rows, row_fits, k0, K, BN: tl.constexpr, GROUP: tl.constexpr):
    """Bytes uint8 [BN, 128 / GROUP, GROUP / 2] of columns k0 .. k0 + 127."""
    # 3-d, as a group's scale then spreads along the last axis without leaving its thread.
    group = tl.arange(0, _TILE // GROUP)
    byte = tl.arange(0, GROUP // 2)
    at = k0 // 2 + group[:, None] * (GROUP // 2) + byte[None, :]
    where = data + rows.to(tl.int64)[:, None, None] * (K // 2) + at[None, :, :]
    fits = row_fits[:, None, None] & (at < K // 2)[None, :, :]
    return tl.load(where, mask=fits, other=0)


@triton.jit
def group_scales(
    scale, rows, row_fits, k0, K, WIDTH: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr
):
    """fp32 [BN, WIDTH / GROUP] of columns k0 .. k0 + WIDTH - 1, of one of the FP4 formats."""
    group = k0 // GROUP + tl.arange(0, WIDTH // GROUP)
    where = scale + rows.to(tl.int64)[:, None] * (K // GROUP) + group[None, :]
    fits = row_fits[:, None] & (group < K // GROUP)[None, :]
    byte = tl.load(where, mask=fits, other=0)
    return e4m3(byte, tl.float32) if FORMAT == _NVFP4 else e8m0(byte.to(tl.int32))


@triton.jit
def fp4_tile(
    data, scale, rows, row_fits, k0, K, BN: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr
):
    """The even and the odd columns of a tile, [BN, 64] each, group scales included.

    ``data`` and ``scale`` are of the matrix, ``rows`` [BN] its rows, of which those exist where
    ``row_fits``. ``WIDE`` is what the product takes: bf16 or fp32.
    """
    GROUP: tl.constexpr = 16 if FORMAT == _NVFP4 else 32
    codes = _fp4_codes(data, rows, row_fits, k0, K, BN, GROUP)
    each = group_scales(scale, rows, row_fits, k0, K, _TILE, GROUP, FORMAT)[:, :, None]
    even, odd = e2m1_pairs(codes, each, WIDE)
    return even.reshape([BN, _TILE // 2]), odd.reshape([BN, _TILE // 2])


@triton.jit
def plain_tile(
    data, rows, row_fits, k0, K, BN: tl.constexpr, FORMAT: tl.constexpr, WIDE: tl.constexpr
):
    """A tile [BN, 128] of any other format, its block's or matrix' scale left out."""
    columns = k0 + tl.arange(0, _TILE)
    where = data + rows.to(tl.int64)[:, None] * K + columns[None, :]
    fits = row_fits[:, None] & (columns < K)[None, :]
    if FORMAT < _FP8_BLOCK:
        found = tl.load(where, mask=fits, other=0.0)
        if WIDE == tl.float32:  # noqa: SIM300
            found = widen(found)
    else:
        found = e4m3(tl.load(where, mask=fits, other=0), WIDE)
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
