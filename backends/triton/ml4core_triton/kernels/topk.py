"""``topk``: the exact k largest, in ascending order of position, ties to the lowest position.

A tournament. A row's scores are cut into tiles that one program holds in registers; each keeps its
k largest with their positions, in order, and what they keep is the next round's row, until one tile
is left. A program finds what its k largest reach by bits, from the top: 32 counts over a tile at
most, and fewer where a count is k. No histogram, no atomic, no wait of one program for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.numeric import next_power
from ml4core_triton.kernels.to_slots import slot_of

TILE = 16384
"""Scores of a tile at most: 32 registers of 512 threads."""

LEAST_RATIO = 4
"""A tile has at least so many times what it keeps: else rounds would hardly shrink a row."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of a launch.

    Attributes:
        first: scores of a tile of the first round, at most.
        part: scores of a tile that are ranked at once.
        each: scores a warp.
    """

    first: int
    part: int
    each: int


def shape_key(rows: int, columns: int, k: int) -> str:
    """The shape by which sizes are measured."""
    return f"{k} of {next_power(columns)}, {next_power(rows)} rows"


LEAST = tl.constexpr(-(2**31))
"""Below the key of every number; stands for none."""


@triton.jit
def order_key(x):
    """int32 keys in the order of fp32 ``x``; one for both zeros. ``LEAST`` for NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    # Negative floats grow downwards: flip all but the sign.
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, LEAST, key)


@triton.jit
def border_key(key, k):
    """An int32 that exactly ``k`` of ``key`` [C] reach, or where ties leave none, the largest that
    more do; ``LEAST`` if no more than k are numbers.
    """
    border = LEAST
    held = tl.sum((key > LEAST).to(tl.int32), 0)
    if held > k:
        count = tl.sum((key >= 0).to(tl.int32), 0)
        border = tl.where(count >= k, 0, border)
        held = tl.where(count >= k, count, held)
        bit = 30
        while (bit >= 0) & (held != k):
            trial = border | (1 << bit)
            count = tl.sum((key >= trial).to(tl.int32), 0)
            border = tl.where(count >= k, trial, border)
            held = tl.where(count >= k, count, held)
            bit -= 1
    return border


@triton.jit
def _entries(
    scores,
    in_positions,
    in_keys,
    seen,
    in_lanes,
    lane,
    FIRST: tl.constexpr,
):
    """Position, key and whether it is NaN of each ``lane`` of a row; ``LEAST`` where there is none.

    The first round's pointers are those of the row, the others' are of what its programs kept.
    """
    if FIRST:
        position = lane
        x = tl.load(scores + lane, lane < seen, other=float("-inf"))
        # -inf may be chosen where it is visible, what is not visible never.
        key = tl.where(lane < seen, order_key(x), LEAST)
        nan = (x != x) & (lane < seen)
    else:
        position = tl.load(in_positions + lane, lane < in_lanes, other=-1)
        key = tl.load(in_keys + lane, lane < in_lanes, other=LEAST)
        nan = lane < 0
    return position, key, nan


@triton.jit
def topk_kernel(
    scores,
    visible,
    in_positions,
    in_keys,
    in_nans,
    out_positions,
    out_keys,
    out_nans,
    lens,
    slots,
    block_table,
    row_request,
    columns,
    in_tiles,
    out_tiles,
    pages,
    scores_stride,
    table_stride,
    k,
    KP: tl.constexpr,
    C: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program keeps the k largest of a tile of ``C``: of scores in the ``FIRST`` round, else of
    what ``C / KP`` programs of the round before have kept. The ``LAST`` writes the results.

    What is kept is written in parts, for which the tile is read again: it needs more registers than
    the search.
    """
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    seen = tl.minimum(tl.load(visible + row), columns)
    scores += row * scores_stride
    in_positions += row * in_tiles * KP
    in_keys += row * in_tiles * KP
    lane = tile * C + tl.arange(0, C)
    _, key, nan = _entries(scores, in_positions, in_keys, seen, in_tiles * KP, lane, FIRST)
    if FIRST:
        has_nan = tl.max(nan.to(tl.int32), 0)
    else:
        source = tile * (C // KP) + tl.arange(0, C // KP)
        nans = tl.load(in_nans + row * in_tiles + source, source < in_tiles, other=0)
        has_nan = tl.max(nans, 0)
    border = border_key(key, k)
    above_all = tl.sum((key > border).to(tl.int32), 0)
    left = k - above_all
    out_positions += row * k if LAST else (row * out_tiles + tile) * KP
    table = block_table
    if SLOTS:
        table += tl.load(row_request + row) * table_stride
    above_before = 0
    ties_before = 0
    for at in range(0, C, PART):
        part = tile * C + at + tl.arange(0, PART)
        position, own, _own_nan = _entries(
            scores, in_positions, in_keys, seen, in_tiles * KP, part, FIRST
        )
        above = own > border
        tied = (own == border) & (own > LEAST)
        # Both ranks in one scan: neither exceeds 2**15.
        ranks = tl.cumsum((above.to(tl.int32) << 16) | tied.to(tl.int32), 0)
        ties = ties_before + (ranks & 0xFFFF)
        chosen = above | (tied & (ties <= left))
        target = above_before + (ranks >> 16) + tl.minimum(ties, left) - 1
        tl.store(out_positions + target, position, chosen)
        if not LAST:
            tl.store(out_keys + (row * out_tiles + tile) * KP + target, own, chosen)
        elif SLOTS:
            found = slot_of(position, chosen, table, pages, BLOCK_SIZE)
            tl.store(slots + row * k + target, found, chosen)
        above_before += tl.sum(above.to(tl.int32), 0)
        ties_before += tl.sum(tied.to(tl.int32), 0)
    count = above_before + tl.minimum(ties_before, left)
    rest = tl.arange(0, KP)
    if LAST:
        behind = (rest >= count) & (rest < k)
        tl.store(out_positions + rest, -1, behind)
        if SLOTS:
            tl.store(slots + row * k + rest, -1, behind)
        tl.store(lens + row, count)
        tl.store(out_nans + row, has_nan != 0)
    else:
        # The next round doesn't read how many there are.
        tl.store(out_keys + (row * out_tiles + tile) * KP + rest, LEAST, rest >= count)
        tl.store(out_nans + row * out_tiles + tile, has_nan)


class Chosen(NamedTuple):
    """int32 positions [T, k] and lens [T], bool has_nan [T], and int32 slots [T, k] if asked."""

    positions: Tensor
    lens: Tensor
    has_nan: Tensor
    slots: Tensor | None


def topk(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions int32 [T, k], lens int32 [T] and has_nan bool [T] of scores fp32 [T, S], of which
    the first visible [T] count. ``ValueError`` for a k above a quarter of a tile.
    """
    chosen = choose(scores, visible, k)
    return chosen.positions, chosen.lens, chosen.has_nan


def choose(
    scores: Tensor,
    visible: Tensor,
    k: int,
    block_table: Tensor | None = None,
    row_request: Tensor | None = None,
    block_size: int = 1,
    *,
    ahead: bool = False,
    measured: Callable[[str, Tiling], Tiling] | None = None,
) -> Chosen:
    """``topk``, with the slots of what is chosen if a block table int32 [R, B] and the request of
    each row int64 [T] are given. ``ahead``: launches may begin before the end of those before.
    ``measured`` gives the sizes of a shape, by its key, in place of the default ones.
    """
    if not 1 <= k <= TILE // 4:
        raise ValueError(f"top-k of {k}; the kernel keeps 1 to {TILE // 4}")
    rows, columns = scores.shape
    device = scores.device

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    convert = block_table is not None and row_request is not None
    positions, lens = ints(rows, k), ints(rows)
    slots = ints(rows, k) if convert else None
    has_nan = torch.empty(rows, dtype=torch.bool, device=device)
    if not rows:
        return Chosen(positions, lens, has_nan, slots)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    visible = visible.contiguous()
    kept = next_power(k)
    table = block_table if block_table is not None and convert else visible
    requests = row_request.contiguous() if row_request is not None and convert else visible
    if convert and table.stride(1) != 1:
        table = table.contiguous()
    sizes = Tiling(TILE, 4096, 512)
    if measured is not None:
        sizes = measured(shape_key(rows, columns, k), sizes)
    most = max(sizes.first, LEAST_RATIO * kept)
    size = min(most, max(64, next_power(max(columns, kept))))
    tiles = max(1, -(-columns // size))
    sources = (positions, positions, lens)
    in_tiles, first = 1, True
    while True:
        last = tiles == 1
        kept_here = (
            (positions, positions, has_nan)
            if last
            else (
                ints(rows, tiles, kept),
                ints(rows, tiles, kept),
                ints(rows, tiles),
            )
        )
        topk_kernel[(rows, tiles)](
            scores,
            visible,
            *sources,
            *kept_here,
            lens,
            positions if slots is None else slots,
            table,
            requests,
            columns,
            in_tiles,
            tiles,
            table.shape[1] if convert else 1,
            scores.stride(0),
            table.stride(0),
            k,
            KP=kept,
            C=size,
            PART=min(size, sizes.part),
            BLOCK_SIZE=block_size,
            FIRST=first,
            LAST=last,
            SLOTS=convert,
            DEPENDENT=ahead,
            **dependent(ahead),
            num_warps=max(4, min(16, size // sizes.each)),
        )
        if last:
            return Chosen(positions, lens, has_nan, slots)
        sources, in_tiles, first = kept_here, tiles, False
        size = min(TILE, next_power(tiles * kept))
        tiles = -(-tiles * kept // size)
