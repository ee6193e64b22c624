"""Top-k of a long row by one program that reads it twice: what ``topk`` launches on NVIDIA's.

Lanes, at least twice as many as are wanted, go over the row in strides and keep their maxima. What
k of these reach is a floor of the answer: so many scores reach it, and few more. They are found in
a second reading, as bits, and counted; then each place of a short list looks its score up by
counts. The list is searched for the exact border, and what is chosen is written in order with its
slot. A row whose scores tie at the floor, or lie so that too many reach it, is read more often.

Very long rows are cut into parts, and what these keep is the row of a second round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_cuda.kernels.topk_steps import (
    NONE,
    border_of,
    emit,
    emit_all,
    key_of,
    loaded,
    number_of,
    range_of,
)
from ml4core_triton.kernels.chaining import let_next_begin, wait_for_previous


@triton.jit
def _maxima(source, at, end, best, kept, KEYED: tl.constexpr, WHOLE: tl.constexpr):
    """The largest entry of each lane with those of ``4 * LANES`` more, from ``at``: keys int32, or
    numbers, of which ``best`` drops NaN and ``kept`` keeps it. ``WHOLE``: all are before ``end``,
    so that loads are of 16 bytes.
    """
    lanes: tl.constexpr = best.shape[0]
    for fourth in tl.static_range(4):
        entry = at + fourth * lanes + tl.arange(0, lanes)
        if WHOLE:
            x = tl.load(source + entry)
        elif KEYED:
            x = tl.load(source + entry, entry < end, other=0)
        else:
            x = tl.load(source + entry, entry < end, other=float("-inf"))
        if KEYED:
            best = tl.maximum(best, x.to(tl.uint32, bitcast=True))
        else:
            best = tl.maximum(best, x)
            kept = tl.maximum(kept, x, propagate_nan=tl.PropagateNan.ALL)
    return best, kept


@triton.jit
def _lane_keys(source, begin, end, KEYED: tl.constexpr, LANES: tl.constexpr):
    """Keys uint32 of the largest entry of each lane, not less than that of -inf where there is none
    but NaN; and 1 for lanes with NaN.
    """
    if KEYED:  # noqa: SIM108, types differ
        best = tl.zeros((LANES,), tl.uint32)
    else:
        best = tl.full((LANES,), float("-inf"), tl.float32)
    kept = best
    whole = begin + (end - begin) // (4 * LANES) * (4 * LANES)
    for at in range(begin, whole, 4 * LANES):
        best, kept = _maxima(source, at, end, best, kept, KEYED, True)
    for at in range(whole, end, 4 * LANES):
        best, kept = _maxima(source, at, end, best, kept, KEYED, False)
    if KEYED:
        keys = best
        nans = tl.zeros((LANES,), tl.int32)
    else:
        keys = key_of(best)
        nans = (kept != kept).to(tl.int32)
    return keys, nans


@triton.jit
def _mark(
    source, words, begin, at, end, border, floor, KEYED: tl.constexpr, WHOLE: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Writes which of ``4 * LANES`` entries from ``at`` reach a key, and the number of it."""
    word = tl.arange(0, LANES // 8)
    bit = tl.arange(0, 32)
    entry = at + (word[:, None] * 32 + bit[None, :])
    if KEYED:
        key, _nan = loaded(source, entry, end, True)
        reaches = (key >= border) & (key > NONE)
    elif WHOLE:
        reaches = tl.load(source + entry) >= floor
    else:
        reaches = tl.load(source + entry, entry < end, other=float("nan")) >= floor
    found = tl.sum(tl.where(reaches, 1 << bit[None, :], 0), 1)
    tl.store(words + (at - begin) // 32 + word, found)


@triton.jit
def _bits(word):
    """How many bits of uint32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _set_bit(word, rank):
    """The place of the set bit of uint32 before which there are ``rank`` others."""
    place = rank * 0
    for power in tl.static_range(5):
        # Halves of 16, 8, 4, 2 and 1 bits.
        low = word & ((1 << (16 >> power)) - 1)
        below = _bits(low)
        above = rank >= below
        rank = tl.where(above, rank - below, rank)
        place = tl.where(above, place + (16 >> power), place)
        word = tl.where(above, word >> (16 >> power), low)
    return place


@triton.jit
def sieve_kernel(
    source,
    visible,
    in_positions,
    in_nans,
    words,
    counts,
    out_positions,
    out_keys,
    out_nans,
    lens,
    slots,
    block_table,
    row_request,
    columns,
    each,
    in_parts,
    out_parts,
    pages,
    source_stride,
    table_stride,
    k,
    KP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYED: tl.constexpr,
    LAST: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program keeps the k largest of ``each`` entries of a row: of scores, or where ``KEYED`` of
    what ``in_parts`` programs of the round before have kept. The ``LAST`` writes the results.

    ``words`` and ``counts`` hold a bit and a thirty-second of a count for each entry.
    """
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source += row * source_stride
    begin = part * each
    if KEYED:
        end = tl.minimum(begin + each, columns)
        in_positions += row * source_stride
    else:
        end = tl.minimum(begin + each, tl.minimum(tl.load(visible + row), columns))
    lane = tl.arange(0, LANES)
    short = end - begin <= LANES
    if short:
        # Each lane has one entry: the border is exact.
        best, nan = loaded(source, begin + lane, end, KEYED)
        nans = nan.to(tl.int32)
    else:
        best, nans = _lane_keys(source, begin, end, KEYED, LANES)
    if KEYED:
        nans = tl.load(in_nans + row * in_parts + lane, lane < in_parts, other=0)
    has_nan = tl.max(nans, 0)
    numbers = tl.sum((best > NONE).to(tl.int32), 0)
    low, high = range_of(best)
    border, over, _held = border_of(best, low, high, numbers, k, tl.where(short, 0, k // 16))
    table = block_table
    if SLOTS:
        table += tl.load(row_request + row) * table_stride
    kept = (row * out_parts + part) * KP
    out_positions += row * k if LAST else kept
    out_keys += kept
    slots += row * k
    above = 0
    ties = 0
    left = k
    reach = 0
    if short:
        left = k - over
        position = begin + lane
        if KEYED:
            position = tl.load(in_positions + position, position < end, other=-1)
        above, ties = emit(
            best, position, border, left, 0, 0, table, pages, out_positions, out_keys, slots,
            BLOCK_SIZE, LAST, SLOTS,
        )  # fmt: skip
    else:
        offset = row * (out_parts * (each // 32)) + part * (each // 32)
        words += offset
        counts += offset
        floor = number_of(border)
        whole = begin + (end - begin) // (4 * LANES) * (4 * LANES)
        for at in range(begin, whole, 4 * LANES):
            _mark(source, words, begin, at, end, border, floor, KEYED, True, LANES)
        for at in range(whole, end, 4 * LANES):
            _mark(source, words, begin, at, end, border, floor, KEYED, False, LANES)
        tl.debug_barrier()
        all_words = tl.cdiv(end - begin, 4 * LANES) * (LANES // 8)
        half = tl.arange(0, LANES // 2)
        for at in range(0, all_words, LANES // 2):
            fits = at + half < all_words
            own = _bits(tl.load(words + at + half, fits, other=0).to(tl.uint32, bitcast=True))
            tl.store(counts + at + half, reach + tl.cumsum(own, 0) - own, fits)
            reach += tl.sum(own, 0)
        tl.debug_barrier()
        if reach <= LANES:
            place = lane * 0
            step = tl.full((), 1, tl.int32)
            while step * 2 < all_words:
                step *= 2
            while step > 0:
                trial = place + step
                behind = trial < all_words
                before = tl.load(counts + trial, behind, other=0)
                place = tl.where(behind & (before <= lane), trial, place)
                step = step // 2
            listed = lane < reach
            own = tl.load(words + place, listed, other=0).to(tl.uint32, bitcast=True)
            entry = begin + place * 32 + _set_bit(own, lane - tl.load(counts + place))
            entry = tl.where(listed, entry, end)
            key, _nan = loaded(source, entry, end, KEYED)
            low, high = range_of(key)
            border, over, _held = border_of(key, low, high, reach, k, 0)
            left = k - over
            position = entry
            if KEYED:
                position = tl.load(in_positions + entry, listed, other=-1)
            above, ties = emit(
                key, position, border, left, 0, 0, table, pages, out_positions, out_keys, slots,
                BLOCK_SIZE, LAST, SLOTS,
            )  # fmt: skip
        else:
            above = emit_all(
                source, in_positions, begin, end, border, k, table, pages, out_positions, out_keys,
                slots, BLOCK_SIZE, KEYED, LAST, SLOTS, LANES,
            )  # fmt: skip
    count = above + tl.minimum(ties, left)
    rest = tl.arange(0, KP)
    if LAST:
        behind = (rest >= count) & (rest < k)
        tl.store(out_positions + rest, -1, behind)
        if SLOTS:
            tl.store(slots + rest, -1, behind)
        tl.store(lens + row, count)
        tl.store(out_nans + row, has_nan != 0)
    else:
        # The next round doesn't read how many there are.
        tl.store(out_keys + rest, 0, rest >= count)
        tl.store(out_nans + row * out_parts + part, has_nan)
