"""``indexer_logits``: scores of the lightning indexer over paged keys.

The keys of a tile are the left operand, the heads of a request's rows the right one: a key is read
once for all rows of its request, and no head count pads the tile. Codes go from the cache to the
matrix units of gfx950 as they are, with fp32 sums; gfx942, whose units don't take e4m3fn, has them
in float16.

Rate model (MI350X, 8 TB/s; 32 heads): 132 bytes and 8,192 operations a key and row, so that bytes
count up to some 30 rows a request. 64k keys of one row are 8.7 MB, 1.1 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.kernels.index_scores import operand, queries, scored
from ml4core_rocm.kernels.keys import FP32, index_keys, key_scales, key_tile
from ml4core_rocm.kernels.numeric import next_power
from ml4core_rocm.kernels.target import compute_units, fp8_products

COLUMNS = 128
"""Rows times heads of a tile at most."""
_FILLED = tl.constexpr(1024)


@triton.jit
def indexer_logits_kernel(
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
):
    """A program scores ``tiles_each`` tiles of keys for ``BR`` rows of a request. Where ``FILL``,
    columns that a row doesn't see become -inf, those of rows of no request too.
    """
    request = tl.program_id(0) // row_tiles
    first_column = tl.program_id(1) * tiles_each * BK
    last_column = tl.minimum(first_column + tiles_each * BK, columns)
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
        if begin < end:
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
                KIND == FP32,
                FP8,
            )
            each = begin + tl.arange(0, BR)
            seen = tl.load(visible + each, each < end, other=0)
            seen = tl.minimum(seen, columns)
            longest = tl.max(seen, 0)
            last = last_column if FILL else tl.minimum(last_column, longest)
            out = scores + each.to(tl.int64)[None, :] * columns
            for at in range(first_column, last, BK):
                position = at + tl.arange(0, BK)
                known = position < longest
                page = tl.load(
                    block_table + request.to(tl.int64) * table_stride + position // BLOCK_SIZE,
                    mask=known,
                    other=0,
                )
                known = known & (page >= 0) & (page < blocks)
                offset = tl.where(known, page, 0).to(tl.int64) * page_stride
                inside = position % BLOCK_SIZE
                left = operand(
                    key_tile(pages, offset, inside, known, KIND, D, BD), KIND == FP32, FP8
                )
                found = scored(left, right, factor, BK, BR, BH)
                if KIND != FP32:
                    key_scale = key_scales(pages, offset, inside, known, D, BLOCK_SIZE)
                    found = found * key_scale[:, None]
                sees = position[:, None] < seen[None, :]
                written = (each < end)[None, :] & (position < last)[:, None]
                tl.store(
                    out + position[:, None],
                    tl.where(sees, found, float("-inf")),
                    mask=written if FILL else written & sees,
                )


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
) -> Tensor:
    """Scores fp32 [T, S] of queries [T, Hi, D] with weights fp32 [T, Hi]; -inf where a row doesn't
    see. ``ValueError`` for a layout that isn't served.
    """
    return scores(q, weights, scale, cache, block_table, query_start, visible, max_rows, fill=True)


def scores(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
    *,
    fill: bool,
) -> Tensor:
    """``indexer_logits``; without ``fill``, what a row doesn't see is left as the memory was."""
    keys = index_keys(cache)
    rows, heads, width = q.shape
    requests, pages = block_table.shape
    columns = pages * cache.block_size
    if width != keys.width:
        raise ValueError(f"queries have {width} values; keys of this cache have {keys.width}")
    out = torch.empty(rows, columns, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    wide = keys.kind == FP32.value
    row_block, padded = row_tile_of(heads, max_rows, 64 if wide else COLUMNS)
    block = 32 if wide else 64
    row_tiles = -(-max_rows // row_block)
    tiles = -(-columns // block)
    # Enough programs to fill the device several times, as requests differ in length.
    wanted = max(1, 4 * compute_units(q.device) // (requests * row_tiles))
    tiles_each = -(-tiles // min(tiles, wanted))
    grid = (requests * row_tiles + (1 if fill else 0), -(-tiles // tiles_each))
    indexer_logits_kernel[grid](
        q,
        weights,
        scale,
        keys.pages,
        table,
        query_start.contiguous(),
        visible.contiguous(),
        out,
        rows,
        requests,
        row_tiles,
        columns,
        tiles_each,
        cache.blocks,
        keys.page_stride,
        table.stride(0),
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        Hi=heads,
        BH=padded,
        BR=row_block,
        D=width,
        BD=max(16, next_power(width)),
        BK=block,
        KIND=keys.kind,
        FP8=fp8_products(q.device),
        BLOCK_SIZE=cache.block_size,
        FILL=fill,
        num_warps=4,
        num_stages=2,
    )
    return out


def row_tile_of(heads: int, max_rows: int, columns: int) -> tuple[int, int]:
    """Rows of a tile, and the heads that each takes of its columns."""
    padded = next_power(heads)
    rows = max(1, min(next_power(max_rows), columns // padded))
    # The matrix units take 16 columns at least.
    return rows, max(padded, 16 // rows)
