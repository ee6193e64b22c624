"""The inner loop of the product of a single row with a weight, by dot products in fp32.

A thread holds a few columns of many rows of the weight: what it needs of the activation is read
once for all of them, in the layout in which it is needed, and sums stay in the thread until the
end. That leaves about 3.3 instructions an e4m3 code and 4.5 one of FP4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_cuda.kernels.fp4 import E4M3_SIZE, e2m1_numbers
from ml4core_cuda.kernels.weight_tiles import group_numbers
from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.numeric import widen
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, NVFP4

APART, TOGETHER, IN_TURN = range(3)
"""How rows of a weight that one program of ``row_sum`` takes lie: anyhow; in one block of 128; or
in one block those at even places, and in a later one those at odd places.
"""

_APART, _TOGETHER = tl.constexpr(APART), tl.constexpr(TOGETHER)
_IN_TURN = tl.constexpr(IN_TURN)
_FP8_BLOCK, _NVFP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4)
_E4M3_SIZE = tl.constexpr(E4M3_SIZE.value)
_TILE = tl.constexpr(K_TILE)


@triton.jit
def _row_numbers(x, k0, local, K, EVEN: tl.constexpr):
    """fp32 numbers of a row of the activation, at columns k0 + ``local``."""
    if EVEN:
        found = tl.load(x + k0 + local)
    else:
        found = tl.load(x + k0 + local, mask=k0 + local < K, other=0.0)
    return widen(found)


@triton.jit
def block_scales(scale, rows, block, K, BN: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """fp32 of blocks of 128 columns, ``block`` [C], for rows [BN]: [C, 1] if they share a block of
    rows, else [C, BN].
    """
    blocks = tl.cdiv(K, _TILE)
    inside = (block < blocks)[:, None]
    if ROWS != _APART:
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
            factor = block_scales(scale, rows, block, K, BN, ROWS, EVEN)
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
