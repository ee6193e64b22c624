"""What the forms of ``topk`` share: keys, the search for a border, and what is written in order."""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.to_slots import slot_of
from ml4core_triton.kernels.topk import order_key

NONE = tl.constexpr(0)
"""Below the key of every number; stands for none."""
_SIGN = tl.constexpr(0x80000000)


@triton.jit
def key_of(x):
    """Keys uint32 in the order of fp32 ``x``; one for both zeros. ``NONE`` for NaN."""
    return order_key(x).to(tl.uint32, bitcast=True) ^ _SIGN


@triton.jit
def number_of(key):
    """The fp32 number of a key; -inf of ``NONE``."""
    flipped = (key ^ _SIGN).to(tl.int32, bitcast=True)
    bits = flipped ^ ((flipped >> 31) & 0x7FFFFFFF)
    return tl.where(key == NONE, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def loaded(source, lane, end, KEYED: tl.constexpr):
    """Keys uint32 of entries ``lane`` before ``end``, and whether each is NaN: of fp32 scores, or
    of keys that a round before kept.
    """
    inside = lane < end
    if KEYED:
        key = tl.load(source + lane, inside, other=0).to(tl.uint32, bitcast=True)
        nan = lane < 0
    else:
        x = tl.load(source + lane, inside, other=0.0)
        key = tl.where(inside, key_of(x), NONE)
        nan = (x != x) & inside
    return key, nan


@triton.jit
def border_of(key, low, high, held, k, slack):
    """A key that ``k`` to ``k + slack`` of ``key`` reach, or where ties leave none, the largest
    that more do; ``NONE`` if no more than k are numbers, of which there are ``held``. These reach
    ``low``, and none ``high``. With it, how many reach the least key that was seen to be too large:
    all that are above a border of ties. And how many reach the border.

    Four counts at a time, in one sum, since waiting for a sum of all threads is what the search is
    about. They lie about where the counts so far let the border be expected, or if that shrank the
    range by little, evenly.
    """
    above = 0
    evenly = 0
    if held <= k:
        low = tl.zeros((), tl.uint32)
        high = low
    while (high - low > 1) & (held > k + slack):
        width = high - low
        if evenly > 0:
            first = tl.maximum(width // 5, 1)
            second = tl.minimum(2 * first, width - 1)
            third = tl.minimum(3 * first, width - 1)
            fourth = tl.minimum(4 * first, width - 1)
        else:
            part = (held - k - slack // 2).to(tl.float32) / (held - above).to(tl.float32)
            middle = (width.to(tl.float32) * tl.minimum(part, 0.99)).to(tl.uint32)
            middle = tl.maximum(tl.minimum(middle, width - 1), 1)
            far, near = width // 8, width // 64
            first = tl.maximum(middle, far + 1) - far
            second = tl.maximum(middle, near + 1) - near
            third = middle + tl.minimum(near, width - 1 - middle)
            fourth = middle + tl.minimum(far, width - 1 - middle)
        # Each count has 16 bits.
        lower = tl.where(key >= low + second, 0x10001, (key >= low + first).to(tl.int32))
        upper = tl.where(key >= low + fourth, 0x10001, (key >= low + third).to(tl.int32))
        counts = tl.sum(lower.to(tl.int64) + (upper.to(tl.int64) << 32))
        one, two = (counts & 0xFFFF).to(tl.int32), ((counts >> 16) & 0xFFFF).to(tl.int32)
        three, four = ((counts >> 32) & 0xFFFF).to(tl.int32), (counts >> 48).to(tl.int32)
        if four >= k:
            low, held = low + fourth, four
        elif three >= k:
            low, high, held, above = low + third, low + fourth, three, four
        elif two >= k:
            low, high, held, above = low + second, low + third, two, three
        elif one >= k:
            low, high, held, above = low + first, low + second, one, two
        else:
            high, above = low + first, one
        evenly = (high - low > width // 3).to(tl.int32)
    return low, above, held


@triton.jit
def range_of(key):
    """The least of the numbers among ``key``, and what none of them reaches."""
    return tl.min(tl.where(key > NONE, key, 0xFFFFFFFF)), tl.max(key) + 1


@triton.jit
def counted(source, begin, end, border, KEYED: tl.constexpr, LANES: tl.constexpr):
    """How many entries reach ``border``, and how many are above it."""
    reach = tl.zeros((LANES,), tl.int32)
    above = tl.zeros((LANES,), tl.int32)
    for at in range(begin, end, LANES):
        key, _nan = loaded(source, at + tl.arange(0, LANES), end, KEYED)
        reach += ((key >= border) & (key > NONE)).to(tl.int32)
        above += (key > border).to(tl.int32)
    return tl.sum(reach, 0), tl.sum(above, 0)


@triton.jit
def ranks_of(own):
    """Sums of int32 ``own`` up to each of them, and of all. In warps first: a scan of all threads
    has a step for each warp of each of their entries.
    """
    rows = tl.reshape(own, (own.shape[0] // 32, 32))
    sums = tl.sum(rows, 1)
    ranks = (tl.cumsum(sums, 0) - sums)[:, None] + tl.cumsum(rows, 1)
    return tl.reshape(ranks, own.shape), tl.sum(sums, 0)


@triton.jit
def emit(
    key, position, border, left, above_before, ties_before, table, pages, out_positions, out_keys,
    slots, BLOCK_SIZE: tl.constexpr, LAST: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Writes those above ``border`` and the first ``left`` that tie with it; entries are in order.
    Returns how many were above and how many tied, with those before.
    """
    above = key > border
    tied = (key == border) & (key > NONE)
    # Both ranks in one scan: neither exceeds 2**15.
    ranks, total = ranks_of((above.to(tl.int32) << 16) | tied.to(tl.int32))
    ties = ties_before + (ranks & 0xFFFF)
    chosen = above | (tied & (ties <= left))
    target = above_before + (ranks >> 16) + tl.minimum(ties, left) - 1
    tl.store(out_positions + target, position, chosen)
    if not LAST:
        tl.store(out_keys + target, key.to(tl.int32, bitcast=True), chosen)
    elif SLOTS:
        tl.store(slots + target, slot_of(position, chosen, table, pages, BLOCK_SIZE), chosen)
    return above_before + (total >> 16), ties_before + (total & 0xFFFF)


@triton.jit
def emit_all(
    source, in_positions, begin, end, border, k, table, pages, out_positions, out_keys, slots,
    BLOCK_SIZE: tl.constexpr, KEYED: tl.constexpr, LAST: tl.constexpr, SLOTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """``emit`` of the k largest of entries that no list holds, which reach ``border`` and more than
    k of which do: they are read again and again. Returns how many were written.
    """
    lane = tl.arange(0, LANES)
    _reached, over = counted(source, begin, end, border, KEYED, LANES)
    if over >= k:
        # More than k are above the floor: the border's bits, from the top.
        bit_of = tl.full((), 0x80000000, tl.uint32)
        border = tl.zeros((), tl.uint32)
        while bit_of > 0:
            reached, _over = counted(source, begin, end, border | bit_of, KEYED, LANES)
            border = tl.where(reached >= k, border | bit_of, border)
            bit_of = bit_of >> 1
        _reached, over = counted(source, begin, end, border, KEYED, LANES)
    left = k - over
    above = 0
    ties = 0
    for at in range(begin, end, LANES):
        key, _nan = loaded(source, at + lane, end, KEYED)
        position = at + lane
        if KEYED:
            position = tl.load(in_positions + position, position < end, other=-1)
        above, ties = emit(
            key, position, border, left, above, ties, table, pages, out_positions, out_keys, slots,
            BLOCK_SIZE, LAST, SLOTS,
        )  # fmt: skip
    return above + tl.minimum(ties, left)
