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

from ml4core_cuda.kernels.fp4 import e2m1_pairs, small_pairs
from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.numeric import INTERPRETED, e8m0, widen
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, NVFP4

_FP8_BLOCK, _NVFP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4)
_TILE = tl.constexpr(K_TILE)


@triton.jit
def _fp4_codes(
    data, rows, row_fits, k0, K, BN: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr
):
    """Bytes uint8 [BN, 128 / GROUP, GROUP / 2] of columns k0 .. k0 + 127."""
    # 3-d, as a group's scale then spreads along the last axis without leaving its thread.
    group = tl.arange(0, _TILE // GROUP)
    byte = tl.arange(0, GROUP // 2)
    at = k0 // 2 + group[:, None] * (GROUP // 2) + byte[None, :]
    where = data + rows.to(tl.int64)[:, None, None] * (K // 2) + at[None, :, :]
    if EVEN:
        found = tl.load(where)
    else:
        fits = row_fits[:, None, None] & (at < K // 2)[None, :, :]
        found = tl.load(where, mask=fits, other=0)
    return found


@triton.jit
def group_scales(
    scale, rows, row_fits, k0, K, BN: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """fp32 of groups of columns k0 .. k0 + 127, of one of the FP4 formats: [BN, 128 / GROUP, 1], or
    if ``EVEN`` as they spread over [BN, 4, 16] bytes.
    """
    group = tl.arange(0, _TILE // GROUP)
    line = rows.to(tl.int64)[:, None] * (K // GROUP)
    if EVEN:
        # Single bytes aren't read ahead; rows of scales begin at multiples of 4 bytes.
        # A thread has 32 columns of a row, so that it needs one word, or half of one.
        HELD: tl.constexpr = 32 // GROUP
        part = tl.arange(0, 4)
        word = (k0 // GROUP // 4 + part * HELD // 4)[None, :]
        found = tl.load(scale.to(tl.pointer_type(tl.int32)) + line // 4 + word)
        found = found >> (part * HELD % 4 * 8)[None, :]
        scales = group_numbers((found & 0xFF).to(tl.uint8), FORMAT)[:, :, None]
        if HELD == 2:
            second = group_numbers(((found >> 8) & 0xFF).to(tl.uint8), FORMAT)[:, :, None]
            scales = tl.where((tl.arange(0, 16) < 8)[None, None, :], scales, second)
    else:
        fits = row_fits[:, None] & (k0 // GROUP + group < K // GROUP)[None, :]
        byte = tl.load(scale + line + (k0 // GROUP + group)[None, :], mask=fits, other=0)
        scales = group_numbers(byte, FORMAT)[:, :, None]
    return scales


@triton.jit
def group_numbers(byte, FORMAT: tl.constexpr):
    """fp32 of scales uint8 of one of the FP4 formats."""
    return decoded(byte, tl.float32, False) if FORMAT == _NVFP4 else e8m0(byte.to(tl.int32))


@triton.constexpr_function
def fp4_is_small(format: int, wide: tl.dtype) -> bool:
    """Whether values of ``fp4_tile`` are ``SMALL`` times too small; known as a kernel is compiled,
    as the two ways differ in type where they meet in fp32.
    """
    return format == NVFP4 and wide == tl.bfloat16 and not INTERPRETED.value


@triton.jit
def fp4_tile(
    data, scale, rows, row_fits, k0, K, BN: tl.constexpr, FORMAT: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The even and the odd columns of a tile, [BN, 64] each, group scales included.

    ``data`` and ``scale`` are of the matrix, ``rows`` [BN] its rows, of which those exist where
    ``row_fits``. They may be too small, see ``fp4_is_small``. ``WIDE`` is what the product takes:
    bf16 or fp32. ``EVEN``: K is a multiple of 128, and all rows may be read.
    """
    GROUP: tl.constexpr = 16 if FORMAT == _NVFP4 else 32
    codes = _fp4_codes(data, rows, row_fits, k0, K, BN, 32 if EVEN else GROUP, EVEN)
    each = group_scales(scale, rows, row_fits, k0, K, BN, GROUP, FORMAT, EVEN)
    if fp4_is_small(FORMAT, WIDE):
        even, odd = small_pairs(codes, each)
    else:
        even, odd = e2m1_pairs(codes, each, WIDE)
    return _in_order(even, BN), _in_order(odd, BN)


@triton.jit
def _in_order(values, BN: tl.constexpr):
    """Values of 64 bytes of each row as [BN, 64], in the order of ``byte_at``."""
    found = tl.permute(tl.reshape(values, (BN, 4, 4, 2, 2)), (0, 2, 3, 1, 4))
    return tl.reshape(found, (BN, _TILE // 2))


@triton.jit
def byte_at(place):
    """Which of a tile's 64 bytes stands at a place of the products' inner axis.

    A thread of the matrix units holds places 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16: these are
    bytes 16t .. 16t + 15 of a row, so that it reads and decodes whole words.
    """
    return place // 2 % 4 * 16 + place // 16 * 4 + place // 8 % 2 * 2 + place % 2


@triton.jit
def plain_tile(
    data, rows, row_fits, k0, K, FORMAT: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr
):
    """A tile [BN, 128] of any other format, its block's or matrix' scale left out. ``EVEN`` as for
    ``fp4_tile``.
    """
    columns = k0 + tl.arange(0, _TILE)
    if FORMAT >= _FP8_BLOCK and WIDE.is_fp8():  # from shared memory as it is
        data = data.to(tl.pointer_type(tl.float8e4nv))
    where = data + rows.to(tl.int64)[:, None] * K + columns[None, :]
    if EVEN:
        found = tl.load(where)
    else:
        zero: tl.constexpr = 0.0 if WIDE.is_fp8() else 0  # integers don't become FP8
        found = tl.load(where, mask=row_fits[:, None] & (columns < K)[None, :], other=zero)
    if FORMAT < _FP8_BLOCK:
        if WIDE == tl.float32:  # noqa: SIM300
            found = widen(found)
    elif not WIDE.is_fp8():
        found = decoded(found, WIDE, False)
    return found
