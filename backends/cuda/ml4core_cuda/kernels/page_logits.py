"""Scores of the indexer, a page of keys at a time: what ``indexer_logits`` launches on Hopper.

A page is one run of bytes, so a program that takes whole pages has one address for each, and no
mask: what lies behind a request's end in its last page is read and not told. Small programs,
several of which share a multiprocessor, hide each other's waits for memory. Keys are decoded once,
into shared memory, as the left operand of the product; they pass a ``while`` that runs once, as a
left operand that was computed would be held in registers, which it reaches by two bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.chaining import let_next_begin, wait_for_previous
from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.keys import key_scales
from ml4core_triton.kernels.numeric import dot
from ml4core_triton.kernels.score_keys import queries

PAGE, WIDTH = 64, 128
"""Keys of a page, which are the rows of one matrix instruction; and values of a key."""

_FILLED = tl.constexpr(1024)
_ONCE = tl.constexpr(1 << 30)
"""Above the keys of a page."""


@triton.jit
def page_logits_kernel(
    q,
    weights,
    scale,
    pages,
    block_table,
    query_start,
    visible,
    scores,
    rows,
    requests,
    row_tiles,
    columns,
    tiles_each,
    blocks,
    page_stride,
    table_stride,
    q_row_stride,
    q_head_stride,
    w_row_stride,
    Hi: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    KIND: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FILL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The arguments are those of ``score_keys``, a tile being a page: ``BK`` is ``BLOCK_SIZE``.

    A program scores ``tiles_each`` pages of keys for ``BR`` rows of a request. Where ``FILL``,
    columns that a row doesn't see become -inf, those of rows of no request too.
    """
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    request = tl.program_id(0) // row_tiles
    first_page = tl.program_id(1) * tiles_each
    first_column = first_page * BLOCK_SIZE
    last_column = tl.minimum(first_column + tiles_each * BLOCK_SIZE, columns)
    if request >= requests:
        if FILL:
            lane = tl.arange(0, _FILLED)
            for row in range(tl.load(query_start + requests), rows):
                start = scores + (lane * 0 + row).to(tl.int64) * columns
                for at in range(first_column, last_column, _FILLED):
                    tl.store(start + (at + lane), float("-inf"), at + lane < last_column)
    else:
        begin = tl.load(query_start + request)
        begin += (tl.program_id(0) % row_tiles) * BR
        end = tl.load(query_start + request + 1)
        each = begin + tl.arange(0, BR)
        seen = tl.minimum(tl.load(visible + each, each < end, other=0), columns)
        last = last_column if FILL else tl.minimum(last_column, tl.max(seen, 0))
        if (begin < end) & (first_column < last):
            # Columns of the right operand: row r, head h at r * BH + h.
            index = tl.arange(0, BR * BH)
            row = (begin + index // BH).to(tl.int64)
            head = index % BH
            fits = (row < end) & (head < Hi)
            right, factor = queries(
                q,
                weights,
                scale,
                row,
                fits,
                head,
                q_row_stride,
                q_head_stride,
                w_row_stride,
                D,
                BD,
                False,
                FP8,
            )
            out = scores + each.to(tl.int64)[None, :] * columns
            inside = tl.arange(0, BLOCK_SIZE)
            codes = inside[:, None] * D + tl.arange(0, D)[None, :]
            table = block_table + request.to(tl.int64) * table_stride
            page = tl.load(table + first_page)
            for at in range(first_column, last, BLOCK_SIZE):
                known = (page >= 0) & (page < blocks)
                start = tl.where(known, page, 0).to(tl.int64) * page_stride
                keys = decoded(tl.load(pages + start + codes), tl.float16, False)
                key_scale = key_scales(pages, start, inside, inside >= 0, KIND, D, BLOCK_SIZE)
                # Of the next page, which may be none; the table's last one is read again then.
                page = tl.load(table + tl.minimum(at + BLOCK_SIZE, columns - 1) // BLOCK_SIZE)
                found = tl.zeros((BLOCK_SIZE, BR), tl.float32)
                left = tl.full((), BLOCK_SIZE, tl.int32)
                while left > 0:
                    sums = dot(keys, right, tl.zeros((BLOCK_SIZE, BR * BH), tl.float32))
                    # NaN stays.
                    sums = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
                    sums = sums * factor[None, :]
                    found = tl.sum(tl.reshape(sums, (BLOCK_SIZE, BR, BH)), 2)
                    # Another value, or it would be no longer carried.
                    keys = tl.zeros(keys.shape, keys.dtype)
                    left -= _ONCE
                found = tl.where(known, found * key_scale[:, None], 0.0)
                position = at + inside
                sees = position[:, None] < seen[None, :]
                written = (each < end)[None, :] & (position < last)[:, None]
                tl.store(
                    out + position[:, None],
                    tl.where(sees, found, float("-inf")),
                    mask=written if FILL else written & sees,
                )
