"""The inner loops of every product with a weight: one row by dot products, more by matrix units.

Both read each byte of the weight once. The weight is the left operand of the matrix units, the
activation the right one: a handful of rows then fills its narrow side, which is padded to 16 at
most, and the decoded codes go from registers straight into the product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core_cuda.kernels.fp4 import E4M3_SIZE, e2m1_numbers
from ml4core_cuda.kernels.weight_tiles import fp4_tile, group_numbers, plain_tile
from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.numeric import dot, widen
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, NVFP4

PLAIN, CODES_BY_BLOCK, CODES_BY_ROW = range(3)
"""What an activation is: numbers; or e4m3 codes with a scale a row and 128 columns, or a row."""

KIND_NAMES = ("numbers", "codes by block", "codes by row")

_BY_BLOCK, _BY_ROW = tl.constexpr(CODES_BY_BLOCK), tl.constexpr(CODES_BY_ROW)
_FP8_BLOCK, _NVFP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4)
_E4M3_SIZE = tl.constexpr(E4M3_SIZE.value)

APART, TOGETHER, IN_TURN = range(3)
"""How rows of a weight that one program of ``row_sum`` takes lie: anyhow; in one block of 128; or
in one block those at even places, and in a later one those at odd places.
"""

_TOGETHER, _IN_TURN = tl.constexpr(TOGETHER), tl.constexpr(IN_TURN)
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
        found = decoded(tl.load(where, mask=inside, other=0), WIDE, False)
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
    return acc


@triton.jit
def _row_numbers(x, k0, local, K, EVEN: tl.constexpr):
    """fp32 numbers of a row of the activation, at columns k0 + ``local``."""
    if EVEN:
        found = tl.load(x + k0 + local)
    else:
        found = tl.load(x + k0 + local, mask=k0 + local < K, other=0.0)
    return widen(found)


@triton.jit
def _block_scales(
    scale, rows, block, K, BN: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):
    """fp32 of blocks of 128 columns, ``block`` [C], for rows [BN]: [C, 1] if they share a block of
    rows, else [C, BN].
    """
    blocks = tl.cdiv(K, _TILE)
    inside = (block < blocks)[:, None]
    if ROWS == _TOGETHER or ROWS == _IN_TURN:
        where = scale + (tl.max(rows, axis=0) // _TILE).to(tl.int64) * blocks + block[:, None]
    else:
        where = scale + (rows // _TILE).to(tl.int64)[None, :] * blocks + block[:, None]
    found = tl.load(where) if EVEN else tl.load(where, mask=inside, other=0.0)
    if ROWS == _IN_TURN:
        first = scale + (tl.min(rows, axis=0) // _TILE).to(tl.int64) * blocks + block[:, None]
        other = tl.load(first) if EVEN else tl.load(first, mask=inside, other=0.0)
        found = tl.where((tl.arange(0, BN) % 2 == 1)[None, :], found, other)
    return found


@triton.jit
def row_sum(
    x, data, scale, rows, row_fits, K, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """fp32 [BN]: weight rows [BN] times one activation row, in fp32 whatever the operands are.

    ``BK`` columns a turn, a multiple of 128; ``EVEN``: K is a multiple of it. ``STAGES`` turns are
    read ahead, none if it is 1: then loads go straight into registers. ``ROWS`` says how the rows
    lie; where they do ``IN_TURN`` all of them have to be there. What ``whole_scale`` gives is left
    to the caller.

    A thread holds a few columns of many rows, so that the activation is read once for all of them
    in the layout that it is needed in, and sums stay in the thread until the end.
    """
    kept = tl.where(row_fits, rows, 0)  # rows that aren't there read the first one
    if FORMAT >= _NVFP4:  # or MXFP4
        found = _fp4_row_sum(x, data, scale, kept, K, BN, BK, FORMAT, STAGES, EVEN)
    else:
        found = _plain_row_sum(x, data, scale, kept, K, BN, BK, FORMAT, STAGES, ROWS, EVEN)
    return found


@triton.jit
def _plain_row_sum(
    x, data, scale, rows, K, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 4 if FORMAT == 0 else 8
    # Columns come first: threads are laid along the first axis of those that tell nothing.
    chunk = tl.arange(0, BK // EACH)
    local = chunk[:, None] * EACH + tl.arange(0, EACH)[None, :]
    line = data + rows.to(tl.int64)[None, :, None] * K
    acc = tl.zeros([BK // EACH, BN], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        one = _row_numbers(x, k0, local, K, EVEN)
        where = line + k0 + local[:, None, :]
        if EVEN:
            value = tl.load(where)
        else:
            value = tl.load(where, mask=(k0 + local < K)[:, None, :], other=0)
        if FORMAT == _FP8_BLOCK:
            block = k0 // _TILE + chunk // (_TILE // EACH)
            factor = _block_scales(scale, rows, block, K, BN, ROWS, EVEN)
            if ROWS == _TOGETHER:
                one = one * factor
        value = widen(value) if FORMAT < _FP8_BLOCK else decoded(value, tl.float32, False)
        found = tl.sum(value * one[:, None, :], axis=2)
        if FORMAT == _FP8_BLOCK and ROWS != _TOGETHER:
            found = found * factor
        acc += found
    return tl.sum(acc, axis=0)


@triton.jit
def _fp4_row_sum(
    x, data, scale, rows, K, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A thread takes a whole group at a time, which has one scale."""
    GROUP: tl.constexpr = 16 if FORMAT == _NVFP4 else 32
    BYTES: tl.constexpr = GROUP // 2
    group = tl.arange(0, BK // GROUP)
    byte = tl.arange(0, BYTES)
    local = group[:, None] * BYTES + byte[None, :]
    pair = local[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    line = data + rows.to(tl.int64)[None, :, None] * (K // 2)
    sizes_of_row = rows.to(tl.int64)[None, :] * (K // GROUP)
    words = scale.to(tl.pointer_type(tl.int32)) + sizes_of_row // 4 + (group // 4)[:, None]
    bit = (group % 4 * 8)[:, None]
    acc = tl.zeros([BK // GROUP, BN], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        even, odd = tl.split(_row_numbers(x, k0, pair, K, EVEN))
        where = line + k0 // 2 + local[:, None, :]
        if EVEN:
            # Rows of scales begin at multiples of 4 bytes; single bytes aren't read ahead.
            codes = tl.load(where)
            sizes = ((tl.load(words + k0 // GROUP // 4) >> bit) & 0xFF).to(tl.uint8)
        else:
            inside = k0 // 2 + local < K // 2
            codes = tl.load(where, mask=inside[:, None, :], other=0)
            there = (k0 // GROUP + group < K // GROUP)[:, None]
            place = scale + sizes_of_row + (k0 // GROUP + group)[:, None]
            sizes = tl.load(place, mask=there, other=0)
        low, high = e2m1_numbers(codes)
        found = tl.sum(low * even[:, None, :], axis=2) + tl.sum(high * odd[:, None, :], axis=2)
        acc += found * group_numbers(sizes, FORMAT)
    return tl.sum(acc, axis=0) * _E4M3_SIZE
