"""The inner loops of every product with a weight: one row by dot products, more by matrix units.

Both read each byte of the weight once. The weight is the left operand of the matrix units, the
activation the right one: a handful of rows then fills its narrow side, which is padded to 16 at
most, and the decoded codes go from registers straight into the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_cuda.kernels.numeric import dot, e4m3, widen
from ml4core_cuda.kernels.weight_tiles import (
    FP8_BLOCK,
    K_TILE,
    NVFP4,
    fp4_tile,
    plain_tile,
)

PLAIN, CODES_BY_BLOCK, CODES_BY_ROW = range(3)
"""What an activation is: numbers; or e4m3 codes with a scale a row and 128 columns, or a row."""

KIND_NAMES = ("numbers", "codes by block", "codes by row")

_BY_BLOCK, _BY_ROW = tl.constexpr(CODES_BY_BLOCK), tl.constexpr(CODES_BY_ROW)
_FP8_BLOCK, _NVFP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4)
_TILE = tl.constexpr(K_TILE)


@triton.jit
def _x_tile(
    x, rows, fits, k0, K, START: tl.constexpr, STEP: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Columns k0 + START, + STEP, .. of the next 128 as [128 / STEP, BM]; row offsets [BM]."""
    columns = k0 + START + STEP * tl.arange(0, _TILE // STEP)
    where = x + columns[:, None] + rows[None, :]
    inside = (columns < K)[:, None] & fits[None, :]
    if ACT == 0:
        found = tl.load(where, mask=inside, other=0.0)
        if WIDE == tl.float32:  # noqa: SIM300
            found = widen(found)
    else:
        found = e4m3(tl.load(where, mask=inside, other=0), WIDE)
    return found


@triton.jit
def _x_pairs(x, rows, fits, k0, K):
    """Even and odd columns of the next 128 in bf16, [64, BM] each, read two at a time: rows begin
    at multiples of 4 bytes.
    """
    word = k0 // 2 + tl.arange(0, _TILE // 2)
    where = x.to(tl.pointer_type(tl.int32)) + word[:, None] + (rows // 2)[None, :]
    pair = tl.load(where, mask=(word < K // 2)[:, None] & fits[None, :], other=0)
    even = (pair & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return even, (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def tile_sum(
    x, x_rows, x_fits, x_scale, scale_rows, data, scale, rows, row_fits, k_begin, k_end, K,
    BN: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: weight rows [BN] times activation rows [BM] over columns k_begin .. k_end - 1.

    ``x_rows`` [BM] int64 are offsets of the activation's rows, ``scale_rows`` those of their
    scales. ``WIDE`` is what operands meet in; with e4m3 codes on both sides that may be float8e4nv.
    ``ALIGNED``: the weight rows follow each other within one block of scales, as they do where BN
    divides 128 and the first of them. What ``whole_scale`` gives, and scales a row of the
    activation, are left to the caller.
    """
    if ALIGNED:
        block_row = (tl.min(rows, axis=0) // _TILE).to(tl.int64) * tl.cdiv(K, _TILE)
    acc = tl.zeros([BN, BM], tl.float32)
    for k0 in range(k_begin, k_end, _TILE):
        if FORMAT >= _NVFP4:  # or MXFP4
            even, odd = fp4_tile(data, scale, rows, row_fits, k0, K, BN, FORMAT, WIDE)
            if ACT == 0 and WIDE == tl.bfloat16:  # noqa: SIM300
                x_even, x_odd = _x_pairs(x, x_rows, x_fits, k0, K)
            else:
                x_even = _x_tile(x, x_rows, x_fits, k0, K, 0, 2, ACT, WIDE)
                x_odd = _x_tile(x, x_rows, x_fits, k0, K, 1, 2, ACT, WIDE)
            if ACT == _BY_BLOCK:
                each = dot(odd, x_odd, dot(even, x_even, tl.zeros([BN, BM], tl.float32)))
            else:
                acc = dot(odd, x_odd, dot(even, x_even, acc))
        else:
            tile = plain_tile(data, rows, row_fits, k0, K, BN, FORMAT, WIDE)
            x_tile = _x_tile(x, x_rows, x_fits, k0, K, 0, 1, ACT, WIDE)
            if FORMAT == _FP8_BLOCK or ACT == _BY_BLOCK:
                each = dot(tile, x_tile, tl.zeros([BN, BM], tl.float32))
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
    return acc


@triton.jit
def row_sum(
    x, data, scale, rows, row_fits, K, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [BN]: weight rows [BN] times one activation row, in fp32 whatever the operands are.

    ``BK`` columns a turn, a multiple of 128, ``STAGES`` turns read ahead. Not for FP4, whose codes
    cost more than the bytes here. What ``whole_scale`` gives is left to the caller.
    """
    # A block of columns has one scale: a third axis lets it stay in the threads of its block.
    block = tl.arange(0, BK // _TILE)
    local = block[:, None] * _TILE + tl.arange(0, _TILE)[None, :]
    line = rows.to(tl.int64)[:, None, None] * K
    acc = tl.zeros([BN, BK // _TILE, _TILE], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        columns = k0 + local
        inside = columns < K
        fits = row_fits[:, None, None] & inside[None, :, :]
        one = widen(tl.load(x + columns, mask=inside, other=0.0))[None, :, :]
        where = data + line + columns[None, :, :]
        if FORMAT < _FP8_BLOCK:
            value = widen(tl.load(where, mask=fits, other=0.0))
        else:
            value = e4m3(tl.load(where, mask=fits, other=0), tl.float32)
        if FORMAT == _FP8_BLOCK:
            at = k0 // _TILE + block
            of_row = (rows // _TILE).to(tl.int64)[:, None] * tl.cdiv(K, _TILE) + at[None, :]
            there = row_fits[:, None] & (at < tl.cdiv(K, _TILE))[None, :]
            value = value * tl.load(scale + of_row, mask=there, other=0.0)[:, :, None]
        acc += value * one
    return tl.sum(tl.sum(acc, axis=2), axis=1)
