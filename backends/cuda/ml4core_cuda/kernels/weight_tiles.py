"""Tiles of weights in every open format, decoded to what products take without a rounding.

A tile is [BN, 128] of a matrix [N, K], the inner axis contiguous. What the matrix units get is the
code, in bf16 (or fp32 beside fp32 activations): e4m3 has 4 significant bits, an e2m1 code times an
e4m3 or e8m0 group scale 6 at most, so each is exact there. The scales of ``fp8_block`` multiply a
tile's sum, those of ``fp8_tensor`` and of NVFP4's rows the whole sum, in fp32.

FP4 tiles come as two, of the even and of the odd columns (a byte's low and high nibble); the
activation is read as two such halves, so that nothing is shuffled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_cuda.kernels.fp4 import e2m1_pairs
from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.numeric import e8m0, widen
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, NVFP4

_FP8_BLOCK, _NVFP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4)
_TILE = tl.constexpr(K_TILE)


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
    return group_numbers(tl.load(where, mask=fits, other=0), FORMAT)


@triton.jit
def group_numbers(byte, FORMAT: tl.constexpr):
    """fp32 of scales uint8 of one of the FP4 formats."""
    return decoded(byte, tl.float32, False) if FORMAT == _NVFP4 else e8m0(byte.to(tl.int32))


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
        found = decoded(tl.load(where, mask=fits, other=0), WIDE, False)
    return found
