"""The inner loop of the product of a single row with a weight, by dot products in fp32.

A turn of rows is read as it lies, 16 bytes a thread: neighbours in a warp are so in memory, in the
buffers of what is read ahead too. Only then is it seen as groups of columns, one group a thread,
over which a sum never leaves the thread. That leaves about 3.3 instructions an e4m3 code and 4.5
one of FP4.
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
def _row_numbers(x, k0, column, K, EVEN: tl.constexpr):
    """fp32 numbers of a row of the activation, at k0 + ``column``."""
    if EVEN:
        found = tl.load(x + k0 + column)
    else:
        found = tl.load(x + k0 + column, mask=k0 + column < K, other=0.0)
    return widen(found)


@triton.jit
def group_sums(value, one, BN: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr):
    """fp32 [BN, COUNT]: ``value`` [BN, COUNT * EACH] times ``one`` [COUNT * EACH], a sum for every
    EACH columns.
    """
    return tl.sum(tl.reshape(value * one[None, :], (BN, COUNT, EACH)), axis=2)


@triton.jit
def block_scales(scale, rows, block, K, BN: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """fp32 of blocks of 128 columns, ``block`` [C], for rows [BN]: [1, C] if they share a block of
    rows, else [BN, C].
    """
    blocks = tl.cdiv(K, _TILE)
    inside = (block < blocks)[None, :]
    if ROWS != _APART:
        where = scale + (tl.max(rows, axis=0) // _TILE).to(tl.int64) * blocks + block[None, :]
    else:
        where = scale + (rows // _TILE).to(tl.int64)[:, None] * blocks + block[None, :]
    found = tl.load(where) if EVEN else tl.load(where, mask=inside, other=0.0)
    if ROWS == _IN_TURN:
        first = scale + (tl.min(rows, axis=0) // _TILE).to(tl.int64) * blocks + block[None, :]
        other = tl.load(first) if EVEN else tl.load(first, mask=inside, other=0.0)
        found = tl.where((tl.arange(0, BN) % 2 == 1)[:, None], found, other)
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
    EACH: tl.constexpr = 128 // data.dtype.element_ty.primitive_bitwidth
    COUNT: tl.constexpr = BK // EACH
    column, group = tl.arange(0, BK), tl.arange(0, COUNT)
    line = data + rows.to(tl.int64)[:, None] * K
    acc = tl.zeros([BN, COUNT], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        one = _row_numbers(x, k0, column, K, EVEN)
        where = line + k0 + column[None, :]
        inside = (k0 + column < K)[None, :]
        value = tl.load(where) if EVEN else tl.load(where, mask=inside, other=0)
        value = widen(value) if FORMAT < _FP8_BLOCK else decoded(value, tl.float32, False)
        found = group_sums(value, one, BN, COUNT, EACH)
        if FORMAT == _FP8_BLOCK:
            block = k0 // _TILE + group // (_TILE // EACH)
            found = found * block_scales(scale, rows, block, K, BN, ROWS, EVEN)
        acc += found
    return tl.sum(acc, axis=1)


@triton.jit
def _fp4_row_sum(
    x, data, scale, rows, K, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = 16 if FORMAT == _NVFP4 else 32  # columns with one scale
    COUNT: tl.constexpr = BK // GROUP
    byte, group = tl.arange(0, BK // 2), tl.arange(0, COUNT)
    pair = tl.arange(0, BK)
    line = data + rows.to(tl.int64)[:, None] * (K // 2)
    sizes_of_row = rows.to(tl.int64)[:, None] * (K // GROUP)
    words = scale.to(tl.pointer_type(tl.int32)) + sizes_of_row // 4 + (group // 4)[None, :]
    bit = (group % 4 * 8)[None, :]
    acc = tl.zeros([BN, COUNT], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        numbers = _row_numbers(x, k0, pair, K, EVEN)
        even, odd = tl.split(tl.reshape(numbers, (BK // 2, 2)))
        where = line + k0 // 2 + byte[None, :]
        if EVEN:
            # Rows of scales begin at multiples of 4 bytes; single bytes aren't read ahead.
            codes = tl.load(where)
            sizes = ((tl.load(words + k0 // GROUP // 4) >> bit) & 0xFF).to(tl.uint8)
        else:
            codes = tl.load(where, mask=(k0 // 2 + byte < K // 2)[None, :], other=0)
            there = (k0 // GROUP + group < K // GROUP)[None, :]
            sizes = tl.load(scale + sizes_of_row + (k0 // GROUP + group)[None, :], there, other=0)
        low, high = e2m1_numbers(codes)
        products = low * even[None, :] + high * odd[None, :]
        found = tl.sum(tl.reshape(products, (BN, COUNT, GROUP // 2)), axis=2)
        acc += found * group_numbers(sizes, FORMAT)
    return tl.sum(acc, axis=1) * _E4M3_SIZE
