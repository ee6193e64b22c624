"""Top-k of a row by many programs, in three short launches that come up while the one before runs.

1. Lanes, at least twice as many as are wanted, go over the row in strides: each program writes the
   maxima of some. What k of these reach is a floor: so many scores reach it, and few more.
2. Each program finds the floor from all maxima of the row, and lists those of its own stretch of
   the row that reach it. It has loaded them before the maxima were there.
3. One program a row searches what is listed for the exact border, and writes what is chosen in
   order, with its slot. If more are listed than it holds, it reads the row itself.

Stretches are of the visible length, so that all programs have something to do in short rows too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_cuda.kernels.prefetch import prefetch_rows
from ml4core_cuda.kernels.topk_steps import (
    border_of,
    emit,
    emit_all,
    key_of,
    number_of,
    range_of,
    ranks_of,
)
from ml4core_triton.kernels.chaining import let_next_begin, wait_for_previous

STRETCH = 32
"""What the length of a stretch is a multiple of, in entries: a line of the cache."""
FOUR = tl.constexpr(4)
"""Entries that are loaded together; lists are filled up to so many."""


@triton.jit
def _up_to_four(end, columns):
    """Where loads of entries before ``end`` may end, so that they are of 16 bytes."""
    return tl.minimum((end + FOUR - 1) // FOUR * FOUR, columns)


@triton.jit
def maxima_kernel(
    scores,
    visible,
    maxima,
    columns,
    stride,
    LANES: tl.constexpr,
    OWN: tl.constexpr,
    DEEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Keys of the maxima of ``OWN`` lanes, as bits int32 [T, LANES]; that of -inf for lanes without
    a number. ``DEEP`` entries of a lane are read at once.
    """
    wait_for_previous(DEPENDENT)
    # Only now: the next launch reads scores before it waits.
    let_next_begin(True)
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(visible + row), columns)
    stop = _up_to_four(seen, columns)
    scores += row * stride
    own = tl.program_id(1) * OWN + tl.arange(0, OWN)
    place = (tl.arange(0, DEEP) * LANES)[:, None] + own[None, :]
    best = tl.full((DEEP, OWN), float("-inf"), tl.float32)
    for at in range(0, seen, DEEP * LANES):
        entry = at + place
        x = tl.load(scores + entry, entry < stop, other=float("-inf"))
        best = tl.maximum(best, tl.where(entry < seen, x, float("-inf")))
    key = key_of(tl.max(best, 0))
    tl.store(maxima + row * LANES + own, key.to(tl.int32, bitcast=True))


@triton.jit
def list_kernel(
    scores,
    visible,
    maxima,
    listed,
    counts,
    bounds,
    columns,
    room,
    stride,
    k,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """What ``listed`` int64 [T, PARTS, room] holds: the entries of a stretch that reach the floor,
    in order, each its score above its position, and up to three of NaN behind them. How many they
    are: ``counts`` int32 [T, PARTS], as -1 less that if a NaN was seen. And ``bounds`` int32
    [T, 2]: the key of the floor, and one that no score reaches.
    """
    let_next_begin(True)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    seen = tl.minimum(tl.load(visible + row), columns)
    each = tl.cdiv(seen, PARTS * STRETCH) * STRETCH
    begin = part * each
    end = tl.minimum(begin + each, seen)
    stop = _up_to_four(end, columns)
    scores += row * stride
    lane = tl.arange(0, TILE)
    x = tl.load(scores + begin + lane, begin + lane < stop, other=float("nan"))
    wait_for_previous(True)
    border = tl.zeros((), tl.uint32)
    high = border
    if seen > k:
        best = tl.load(maxima + row * LANES + tl.arange(0, LANES)).to(tl.uint32, bitcast=True)
        low, high = range_of(best)
        border, _above, _held = border_of(best, low, high, tl.full((), LANES, tl.int32), k, k // 16)
    floor = number_of(border)
    place = row * PARTS + part
    listed += place * room
    count = 0
    nans = 0
    for at in range(begin, end, TILE):
        entry = at + lane
        found = (x >= floor) & (entry < end)
        nan = (x != x) & (entry < end)
        ranks, total = ranks_of(found.to(tl.int32) | (nan.to(tl.int32) << 16))
        target = count + (ranks & 0xFFFF) - 1
        bits = x.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(listed + target, (bits << 32) | entry, found & (target < room))
        count += total & 0xFFFF
        nans += total >> 16
        entry += TILE
        x = tl.load(scores + entry, entry < stop, other=float("nan"))
    behind = count + tl.arange(0, FOUR)
    fits = behind < tl.minimum(tl.cdiv(count, FOUR) * FOUR, room)
    tl.store(listed + behind, tl.full((FOUR,), -1, tl.int64), fits)
    tl.store(counts + place, tl.where(nans > 0, -1 - count, count))
    if part == 0:
        tl.store(bounds + 2 * row, border.to(tl.int32, bitcast=True))
        tl.store(bounds + 2 * row + 1, high.to(tl.int32, bitcast=True))


@triton.jit
def choose_kernel(
    scores,
    visible,
    listed,
    counts,
    bounds,
    out_positions,
    out_nans,
    lens,
    slots,
    block_table,
    row_request,
    columns,
    room,
    pages,
    stride,
    table_stride,
    k,
    KP: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The results of a row, from what is listed if that is no more than ``LANES``."""
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(visible + row), columns)
    table = block_table
    if SLOTS:
        table += tl.load(row_request + row) * table_stride
        used = tl.minimum(tl.cdiv(seen, BLOCK_SIZE), pages)
        # Pages are looked up last of all.
        prefetch_rows(table, tl.arange(0, 1), tl.arange(0, 1) < used, used, 4, True)
    wait_for_previous(True)
    part = tl.arange(0, PARTS)
    told = tl.load(counts + row * PARTS + part)
    count = tl.where(told < 0, -1 - told, told)
    # Fours of a list are of one part; entries behind a part's are none.
    fours = tl.cdiv(count, FOUR)
    before = tl.cumsum(fours, 0) - fours
    # In one sum: 27 bits of either, which is as far as columns go, and parts with NaN.
    sums = (told < 0).to(tl.int64) << 54 | count.to(tl.int64) << 27 | fours.to(tl.int64)
    sums = tl.sum(sums, 0)
    all_fours = (sums & 0x7FFFFFF).to(tl.int32)
    reach = ((sums >> 27) & 0x7FFFFFF).to(tl.int32)
    border = tl.load(bounds + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(bounds + 2 * row + 1).to(tl.uint32, bitcast=True)
    out_positions += row * k
    slots += row * k
    listed += row * PARTS * room
    if all_fours <= LANES // FOUR:
        four = tl.arange(0, LANES // FOUR)
        own = four * 0
        for power in tl.static_range(1, 11):
            if (PARTS >> power) > 0:
                trial = own + (PARTS >> power)
                own = tl.where(tl.gather(before, trial, 0) <= four, trial, own)
        first = own * (room // FOUR) + four - tl.gather(before, own, 0)
        lane = tl.arange(0, LANES)
        entry = tl.gather(first, lane // FOUR, 0) * FOUR + lane % FOUR
        found = tl.load(listed + entry, lane < all_fours * FOUR, other=-1)
        key = key_of((found >> 32).to(tl.int32).to(tl.float32, bitcast=True))
        position = found.to(tl.int32)
        border, over, held = border_of(key, border, high, reach, k, 0)
        emit(
            key, position, border, k - over, 0, 0, table, pages, out_positions, out_positions,
            slots, BLOCK_SIZE, True, SLOTS,
        )  # fmt: skip
        chosen = tl.minimum(held, k)
    else:
        chosen = emit_all(
            scores + row * stride, out_positions, 0, seen, border, k, table, pages, out_positions,
            out_positions, slots, BLOCK_SIZE, False, True, SLOTS, 1024,
        )  # fmt: skip
    rest = tl.arange(0, KP)
    behind = (rest >= chosen) & (rest < k)
    tl.store(out_positions + rest, -1, behind)
    if SLOTS:
        tl.store(slots + rest, -1, behind)
    tl.store(lens + row, chosen)
    tl.store(out_nans + row, sums >> 54 != 0)
