"""The inner loops of products of several rows with a weight, by matrix units.

Each byte of the weight is read once. The weight is the left operand of the matrix units, the
activation the right one: a handful of rows then fills its narrow side, which is padded to 16 at
most, and the decoded codes go from registers straight into the product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core_cuda.kernels.fp4 import SMALL
from ml4core_cuda.kernels.weight_tiles import (
    byte_at,
    fp4_is_small,
    fp4_tile,
    plain_tile,
)
from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.numeric import dot, widen
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, NVFP4

PLAIN, CODES_BY_BLOCK, CODES_BY_ROW = range(3)
"""What an activation is: numbers; or e4m3 codes with a scale a row and 128 columns, or a row."""

KIND_NAMES = ("numbers", "codes by block", "codes by row")

_BY_BLOCK, _BY_ROW = tl.constexpr(CODES_BY_BLOCK), tl.constexpr(CODES_BY_ROW)
_FP8_BLOCK, _NVFP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4)
_SMALL = tl.constexpr(SMALL.value)

_TILE = tl.constexpr(K_TILE)


@triton.jit
def _x_tile(
    x, rows, fits, k0, K, START: tl.constexpr, STEP: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The next 128 columns as [128, BM], or if STEP is 2 the even or odd ones as [64, BM] in the
    order of ``byte_at``; row offsets [BM].
    """
    if STEP == 2:
        columns = k0 + START + 2 * byte_at(tl.arange(0, _TILE // 2))
    else:
        columns = k0 + tl.arange(0, _TILE)
    if ACT != 0 and WIDE.is_fp8():  # the matrix units then have it from shared memory as it is
        x = x.to(tl.pointer_type(tl.float8e4nv))
    where = x + columns[:, None] + rows[None, :]
    if EVEN:
        found = tl.load(where)
    else:
        zero: tl.constexpr = 0.0 if WIDE.is_fp8() else 0  # integers don't become FP8
        found = tl.load(where, mask=(columns < K)[:, None] & fits[None, :], other=zero)
    if ACT == 0:
        if WIDE == tl.float32:  # noqa: SIM300
            found = widen(found)
    elif not WIDE.is_fp8():
        found = decoded(found, WIDE, False)
    return found


@triton.jit
def _x_pairs(x, rows, fits, k0, K, EVEN: tl.constexpr):
    """Even and odd columns of the next 128 in bf16, [64, BM] each in the order of ``byte_at``, read
    two at a time: rows begin at multiples of 4 bytes.
    """
    word = k0 // 2 + byte_at(tl.arange(0, _TILE // 2))
    where = x.to(tl.pointer_type(tl.int32)) + word[:, None] + (rows // 2)[None, :]
    if EVEN:
        pair = tl.load(where)
    else:
        pair = tl.load(where, mask=(word < K // 2)[:, None] & fits[None, :], other=0)
    even = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return even, (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


_ROOM = 227 * 1024
"""Bytes of shared memory of a program."""


def stages_within(stages: int, columns: int, rows: int, weight: Tensor, x: Tensor) -> int:
    """As many of ``stages`` tiles of ``tile_sum`` in flight as shared memory holds, at least one:
    tiles of fp32 are large, and need the room of one more, as no matrix unit takes them there.
    """
    each = K_TILE * (columns * weight.element_size() + rows * x.element_size())
    beside = int(max(weight.element_size(), x.element_size()) == 4)
    return max(1, min(stages, _ROOM // each - beside))


@triton.jit
def tile_sum(
    x, x_rows, x_fits, x_scale, scale_rows, data, scale, rows, row_fits, k_begin, k_end, K,
    BN: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: weight rows [BN] times activation rows [BM] over columns k_begin .. k_end - 1.

    ``x_rows`` [BM] int64 are offsets of the activation's rows, ``scale_rows`` those of their
    scales. ``WIDE`` is what operands meet in; with e4m3 codes on both sides that may be float8e4nv.
    ``ALIGNED``: the weight rows follow each other within one block of scales, as they do where BN
    divides 128 and the first of them. ``EVEN``: K is a multiple of 128; rows that aren't there then
    read the first one, and what they sum to is of no meaning. What ``whole_scale`` gives, and
    scales a row of the activation, are left to the caller.
    """
    if ALIGNED:
        block_row = (tl.min(rows, axis=0) // _TILE).to(tl.int64) * tl.cdiv(K, _TILE)
    if EVEN:
        rows, x_rows = tl.where(row_fits, rows, 0), tl.where(x_fits, x_rows, 0)
    acc = tl.zeros([BN, BM], tl.float32)
    for k0 in range(k_begin, k_end, _TILE):
        if FORMAT >= _NVFP4:  # or MXFP4
            even, odd = fp4_tile(data, scale, rows, row_fits, k0, K, BN, FORMAT, WIDE, EVEN)
            if ACT == 0 and WIDE == tl.bfloat16:  # noqa: SIM300
                x_even, x_odd = _x_pairs(x, x_rows, x_fits, k0, K, EVEN)
            else:
                x_even = _x_tile(x, x_rows, x_fits, k0, K, 0, 2, ACT, WIDE, EVEN)
                x_odd = _x_tile(x, x_rows, x_fits, k0, K, 1, 2, ACT, WIDE, EVEN)
            if ACT == _BY_BLOCK:
                each = dot(odd, x_odd, dot(even, x_even, tl.zeros([BN, BM], tl.float32)))
            else:
                acc = dot(odd, x_odd, dot(even, x_even, acc))
        else:
            tile = plain_tile(data, rows, row_fits, k0, K, FORMAT, WIDE, EVEN)
            x_tile = _x_tile(x, x_rows, x_fits, k0, K, 0, 1, ACT, WIDE, EVEN)
            if FORMAT == _FP8_BLOCK or ACT == _BY_BLOCK:
                each = dot(tile, x_tile, tl.zeros([BN, BM], tl.float32))
            elif tl.float8e4nv == WIDE:  # sm_90 keeps few bits of a longer sum of codes
                acc += dot(tile, x_tile, tl.zeros([BN, BM], tl.float32))
            else:
                acc = dot(tile, x_tile, acc)
        if FORMAT == _FP8_BLOCK and not ALIGNED:
            # A tile may straddle two blocks of rows, as where w3 begins inside of one.
            block = scale + (rows // _TILE).to(tl.int64) * tl.cdiv(K, _TILE) + k0 // _TILE
            each = each * tl.load(block, mask=row_fits, other=0.0)[:, None]
        if FORMAT == _FP8_BLOCK and ALIGNED:
            factor = tl.load(scale + block_row + k0 // _TILE)
            if ACT == _BY_BLOCK:
                of_row = tl.load(x_scale + scale_rows + k0 // _TILE, mask=x_fits, other=0.0)
                acc += each * (of_row * factor)[None, :]
            else:
                acc += each * factor
        elif ACT == _BY_BLOCK:
            of_row = tl.load(x_scale + scale_rows + k0 // _TILE, mask=x_fits, other=0.0)
            acc += each * of_row[None, :]
        elif FORMAT == _FP8_BLOCK:
            acc += each
    if fp4_is_small(FORMAT, WIDE):
        acc = acc * _SMALL
    return acc
