"""``indexer_logits``: scores of the lightning indexer over paged keys.

The keys of a tile are the left operand, the heads of a request's rows the right one: a key is read
once for all rows of its request, its 128 codes go from memory to the matrix units through
registers, and no head count pads the tile. Codes meet in float16, which holds each E4M3 number,
with fp32 sums: E4M3's own matrix instruction keeps too few bits of a sum for the contract.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.kernels.indexer_write import AMAX_FLOOR
from ml4core_cuda.kernels.keys import FP32, index_keys, key_scales
from ml4core_cuda.kernels.numeric import (
    dependent,
    dot,
    e4m3,
    e4m3_code,
    finite_size,
    let_next_begin,
    next_power,
    sm_count,
    wait_for_previous,
)
from ml4core_cuda.kernels.row_scales import power_of_two, scale_exponent, widen
from ml4core_cuda.kernels.target import device_name
from ml4core_cuda.tuned import sizes_for

_COLUMNS = 256
"""Rows times heads of a tile at most."""
_FILLED = tl.constexpr(1024)


@dataclass(frozen=True)
class Tiling:
    """Sizes of a launch.

    Attributes:
        keys: keys of a tile.
        columns: rows times heads of a tile at most.
        waves: programs a multiprocessor, as requests differ in length.
    """

    keys: int
    columns: int
    waves: int
    warps: int
    stages: int


def tiling(heads: int, max_rows: int, wide: bool) -> Tiling:
    """The default sizes, by shapes alone."""
    if wide:
        return Tiling(32, 64, 4, 4, 3)
    small = next_power(heads) * next_power(max_rows) <= 64
    return Tiling(128 if small else 64, _COLUMNS, 4, 4 if small else 8, 3)


def shape_key(rows: int, heads: int, columns: int, max_rows: int) -> str:
    """The shape by which sizes are measured."""
    each = f"{min(8, next_power(max_rows))} rows a request"
    return f"{heads} heads, {next_power(rows)} rows of {next_power(columns)}, {each}"


@triton.jit
def _queries(
    q,
    weights,
    scale,
    row,
    fits,
    head,
    q_row_stride,
    q_head_stride,
    w_row_stride,
    Hi: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Queries [columns, BD] as the scores see them, and the factor [columns] of each."""
    column = tl.arange(0, BD)
    place = q + row * q_row_stride + head * q_head_stride
    x = tl.load(
        place[:, None] + column[None, :], mask=fits[:, None] & (column < D)[None, :], other=0.0
    )
    x = widen(x)
    factor = tl.load(weights + row * w_row_stride + head, mask=fits, other=0.0) * scale
    if QUANTISED:
        exponent = scale_exponent(tl.maximum(tl.max(finite_size(x), 1), AMAX_FLOOR))
        found = e4m3(e4m3_code(x * power_of_two(-exponent)[:, None]), tl.float16)
        factor = factor * power_of_two(exponent)
    else:
        found = x
    return found, factor


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
    BLOCK_SIZE: tl.constexpr,
    FILL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program scores ``tiles_each`` tiles of keys for ``BR`` rows of a request. Where ``FILL``,
    columns that a row doesn't see become -inf, those of rows of no request too.
    """
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
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
            queries, factor = _queries(
                q,
                weights,
                scale,
                row,
                fits,
                head,
                q_row_stride,
                q_head_stride,
                w_row_stride,
                Hi,
                D,
                BD,
                KIND != FP32,
            )
            queries = tl.trans(queries)
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
                column = tl.arange(0, BD)
                stored = tl.load(
                    pages + (offset + inside * D)[:, None] + column[None, :],
                    mask=known[:, None] & (column < D)[None, :],
                    other=0,
                )
                keys = stored
                if KIND != FP32:
                    keys = e4m3(stored, tl.float16)
                sums = dot(keys, queries, tl.zeros((BK, BR * BH), tl.float32))
                # Not maximum(), which would hide NaN.
                sums = tl.where(sums < 0.0, 0.0, sums) * factor[None, :]
                found = tl.sum(tl.reshape(sums, (BK, BR, BH)), 2)
                if KIND != FP32:
                    key_scale = key_scales(pages, offset, inside, known, KIND, D, BLOCK_SIZE)
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
    ahead: bool = False,
) -> Tensor:
    """``indexer_logits``; without ``fill``, what a row doesn't see is left as the memory was.
    ``ahead``: the launch may begin before the end of the one before it.
    """
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
    sizes = tiling(heads, max_rows, wide)
    if not wide:
        shape = shape_key(rows, heads, columns, max_rows)
        sizes = sizes_for("indexer_logits", device_name(q.device), shape, sizes)
    padded = next_power(heads)
    row_block = max(1, min(next_power(max_rows), sizes.columns // padded))
    # The matrix units take 16 columns at least.
    padded = max(padded, 16 // row_block)
    row_tiles = -(-max_rows // row_block)
    tiles = -(-columns // sizes.keys)
    wanted = max(1, sizes.waves * sm_count(q.device) // (requests * row_tiles))
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
        BK=sizes.keys,
        KIND=keys.kind,
        BLOCK_SIZE=cache.block_size,
        FILL=fill,
        DEPENDENT=ahead,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **dependent(ahead),
    )
    return out
