"""The inner loop of products of up to 8 rows with a weight in FP4, by matrix units.

Nothing passes through shared memory: what a thread reads, 16 bytes at a time, is what it decodes
and what the matrix units take from it. A turn of a warp is [8 R, 128] of the weight, of which
thread 4 g + t has columns 32 t .. 32 t + 31 of rows g, g + 8, ..; they stand in the order of the
units' inner axis that makes this so, and the activation is put in the same order. The warps of a
program share its rows, and take columns in turn. Codes and scales are read a turn ahead.

About 3.4 instructions a value, of which 2.3 decode it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_cuda.kernels.fp4 import scaled_pairs, size_of
from ml4core_triton.kernels.numeric import INTERPRETED, dot
from ml4core_triton.kernels.weights import K_TILE, NVFP4

_NVFP4, _TILE = tl.constexpr(NVFP4), tl.constexpr(K_TILE)

ROWS = 8
"""Of the activation, at most: the narrow side of the matrix units."""
_ROWS = tl.constexpr(ROWS)


@triton.jit
def place_of(column):
    """Where a column stands in an activation that is written for ``row_sums`` with ``PLACED``."""
    # Eight columns are four bytes: first their low codes, then their high ones.
    return column // 8 * 8 + column % 2 * 4 + column % 8 // 2


@triton.jit
def _codes(data, line, chunk):
    """Words of eight codes, int32 [4, 8, WARPS, C, R, 4], of lines of so many words."""
    lane, word = tl.arange(0, 4), tl.arange(0, 4)
    at = chunk[None, None, :, :, None, None] * (_TILE // 8)
    at = at + lane[:, None, None, None, None, None] * 4 + word
    where = data.to(tl.pointer_type(tl.int32)) + line[None, :, None, None, :, None] + at
    # No other program reads them: what the first cache has beside them stays there.
    return tl.load(where, eviction_policy="evict_first")


@triton.jit
def _bytes(word):
    """The bytes uint8 [.., 16] of words [.., 4]."""
    # As words they stay whole from turn to turn, and where they are decoded.
    even = tl.join(word & 0xFF, (word >> 16) & 0xFF)
    odd = tl.join((word >> 8) & 0xFF, (word >> 24) & 0xFF)
    shape: tl.constexpr = (4, 8, word.shape[2], word.shape[3], word.shape[4], 16)
    return tl.reshape(tl.join(even, odd).to(tl.uint8), shape)


@triton.jit
def _scales(scale, line, chunk, FORMAT: tl.constexpr):
    """Bytes uint8 [4, 8, WARPS, C, R, G], of G groups of a thread's 32 columns."""
    lane = tl.arange(0, 4)[:, None, None, None, None, None]
    where = scale + line[None, :, None, None, :, None] + tl.arange(0, 2)
    if FORMAT == _NVFP4:
        found = tl.load(where + chunk[None, None, :, :, None, None] * 8 + lane * 2)
    else:
        # Two at a time: of single bytes that follow each other one thread would read all.
        both = tl.load(where + chunk[None, None, :, :, None, None] * 4 + lane // 2 * 2)
        even, odd = tl.split(both)
        found = tl.where(lane % 2 == 0, even[:, :, :, :, :, None], odd[:, :, :, :, :, None])
    return found


@triton.jit
def _weights(codes, scales, WAY: tl.constexpr):
    """The two halves of a turn, [WARPS, 8 R, 64 C] each."""
    WARPS: tl.constexpr = codes.shape[2]
    C: tl.constexpr = codes.shape[3]
    R: tl.constexpr = codes.shape[4]
    G: tl.constexpr = scales.shape[5]
    grouped = tl.reshape(codes, (4, 8, WARPS, C, R, G, 16 // G))
    low, high = scaled_pairs(grouped, scales[:, :, :, :, :, :, None], WAY)
    return _as_left(low, WARPS, C, R), _as_left(high, WARPS, C, R)


@triton.jit
def _as_left(values, WARPS: tl.constexpr, C: tl.constexpr, R: tl.constexpr):
    # Of 16 places on the inner axis a thread has 4 that follow each other: of operands made of
    # bytes the compiler has it so, which costs nothing then.
    apart = tl.reshape(values, (4, 8, WARPS, C, R, 4, 4))
    return tl.reshape(tl.permute(apart, (2, 4, 1, 3, 5, 0, 6)), (WARPS, 8 * R, 64 * C))


@triton.jit
def _activations(x, x_rows, chunk, there, PLACED: tl.constexpr):
    """The two halves of a turn, [WARPS, 64 C, 8] each; zeros where it isn't ``there``."""
    WARPS: tl.constexpr = chunk.shape[0]
    C: tl.constexpr = chunk.shape[1]
    lane, word, one = tl.arange(0, 4), tl.arange(0, 4), tl.arange(0, 8)
    at = chunk[None, None, :, :, None, None] * _TILE + word[:, None] * 8 + one
    where = x + x_rows[:, None, None, None, None] + lane[:, None, None, None, None, None] * 32 + at
    found = tl.load(where, mask=there[None, None, :, :, None, None], other=0.0)
    apart = tl.reshape(found, (4, 8, WARPS, C, 4, 2, 2, 2))
    if not PLACED:
        apart = tl.permute(apart, (0, 1, 2, 3, 4, 7, 5, 6))
    apart = tl.permute(apart, (2, 3, 4, 0, 6, 7, 1, 5))
    return tl.split(tl.reshape(apart, (WARPS, 64 * C, 8, 2)))


@triton.jit
def row_sums(
    x, x_rows, data, scale, rows, K, WARPS: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """fp32 [WARPS, 8 R, 8], whose sum over the first axis is weight rows [8, R] times 8 activation
    rows, the one at [g, r] standing at 8 r + g.

    ``x`` is bf16, ``x_rows`` [8] are offsets of its rows, ``rows`` are all there; R is even. K is a
    multiple of 128, and the matrix of less than 2 GiB. ``PLACED``: columns of x stand where
    ``place_of`` has them. ``WARPS`` of the program take ``C`` times 128 columns a turn each. What
    ``whole_scale`` gives is left to the caller.
    """
    if FORMAT == _NVFP4:
        acc = _sums(x, x_rows, data, scale, rows, K, WARPS, C, FORMAT, "e4m3", PLACED)
    elif INTERPRETED:
        acc = _sums(x, x_rows, data, scale, rows, K, WARPS, C, FORMAT, "e8m0", PLACED)
    else:
        acc = _sums(x, x_rows, data, scale, rows, K, WARPS, C, FORMAT, "e8m0 once", PLACED)
        if tl.max(tl.ravel((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1), axis=0) > 0:
            acc = _sums(x, x_rows, data, scale, rows, K, WARPS, C, FORMAT, "e8m0", PLACED)
    return acc


@triton.jit
def _sums(
    x, x_rows, data, scale, rows, K, WARPS: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr,
    WAY: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """The same in one of the ways of ``scaled_pairs``."""
    R: tl.constexpr = rows.shape[1]
    GROUP: tl.constexpr = 16 if FORMAT == _NVFP4 else 32
    SIZE: tl.constexpr = size_of(WAY)
    chunks = K // _TILE
    line = rows * (chunks * (_TILE // 8))
    sizes = rows * (chunks * (_TILE // GROUP))
    own = tl.arange(0, WARPS)[:, None] * C + tl.arange(0, C)[None, :]
    acc = tl.zeros([WARPS, 8 * R, _ROWS], tl.float32)
    # Beyond the last is the first one, times zeros.
    kept = tl.where(own < chunks, own, 0)
    codes, scales = _codes(data, line, kept), _scales(scale, sizes, kept, FORMAT)
    for first in tl.range(0, chunks, C * WARPS, num_stages=1, disable_licm=True):
        chunk = first + own
        there, after = chunk < chunks, chunk + C * WARPS
        after = tl.where(after < chunks, after, 0)
        next_codes, next_scales = _codes(data, line, after), _scales(scale, sizes, after, FORMAT)
        x_low, x_high = _activations(x, x_rows, tl.where(there, chunk, 0), there, PLACED)
        low, high = _weights(_bytes(codes), scales, WAY)
        acc = dot(high, x_high, dot(low, x_low, acc))
        codes, scales = next_codes, next_scales
    return acc * SIZE
