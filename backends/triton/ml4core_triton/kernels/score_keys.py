"""Scores of the lightning indexer over paged keys: what ``indexer_logits`` launches.

The keys of a tile are the left operand, the heads of a request's rows the right one: a key is read
once for all rows of its request, its codes go from memory to the matrix units through registers,
and no head count pads the tile. Codes meet as they are where the matrix units take e4m3fn and keep
all bits of a sum; else in float16, which holds each of them, with fp32 sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.fp8 import decoded, fp8
from ml4core_triton.kernels.keys import FP32, index_keys, key_scales, key_tile, quantised
from ml4core_triton.kernels.numeric import dot, next_power, power_of_two, widen
from ml4core_triton.kernels.target import units_of

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


@triton.jit
def operand(stored, KIND_FP32: tl.constexpr, FP8: tl.constexpr):
    """Codes or fp32 values as products take them: FP8, float16, which holds each E4M3 number, where
    the matrix units don't take e4m3fn, or fp32.
    """
    if KIND_FP32:
        found = stored
    elif FP8:
        found = fp8(stored, False)
    else:
        found = decoded(stored, tl.float16, False)
    return found


@triton.jit
def queries(
    q,
    weights,
    scale,
    row,
    fits,
    head,
    q_row_stride,
    q_head_stride,
    w_row_stride,
    D: tl.constexpr,
    BD: tl.constexpr,
    KIND_FP32: tl.constexpr,
    FP8: tl.constexpr,
):
    """Queries [BD, columns] as the scores see them, and the factor [columns] of each."""
    column = tl.arange(0, BD)
    place = q + row * q_row_stride + head * q_head_stride
    x = tl.load(
        place[:, None] + column[None, :], mask=fits[:, None] & (column < D)[None, :], other=0.0
    )
    x = widen(x)
    factor = tl.load(weights + row * w_row_stride + head, mask=fits, other=0.0) * scale
    if KIND_FP32:
        found = x
    else:
        codes, exponent = quantised(x)
        found = operand(codes, False, FP8)
        factor = factor * power_of_two(exponent)
    return tl.trans(found), factor


@triton.jit
def scored(keys, queries, factor, BK: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    """Scores fp32 [BK, BR] of keys [BK, BD], their scales left out."""
    sums = dot(keys, queries, tl.zeros((BK, BR * BH), tl.float32))
    # Not maximum(), which would hide NaN.
    sums = tl.where(sums < 0.0, 0.0, sums) * factor[None, :]
    return tl.sum(tl.reshape(sums, (BK, BR, BH)), 2)


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
                stored = key_tile(pages, offset, inside, known, KIND, D, BD)
                found = scored(operand(stored, KIND == FP32, FP8), right, factor, BK, BR, BH)
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


def scores(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
    plan: Callable[[bool], Tiling],
    *,
    codes: bool,
    fill: bool,
    ahead: bool = False,
    kernel: Callable[[Tiling], Any] | None = None,
) -> Tensor:
    """Scores fp32 [T, S] of queries [T, Hi, D] with weights fp32 [T, Hi]; -inf where a row doesn't
    see, or without ``fill`` what the memory was.

    ``plan`` gives the sizes, by whether operands are fp32; ``codes``: they meet as they are, in
    place of float16. ``ahead``: the launch may begin before the end of the one before it.
    ``kernel`` gives another kernel of the same arguments, by the sizes.
    ``ValueError`` for a layout that isn't read.
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
    sizes = plan(wide)
    padded = next_power(heads)
    row_block = max(1, min(next_power(max_rows), sizes.columns // padded))
    # The matrix units take 16 columns at least.
    padded = max(padded, 16 // row_block)
    row_tiles = -(-max_rows // row_block)
    tiles = -(-columns // sizes.keys)
    wanted = max(1, sizes.waves * units_of(q.device) // (requests * row_tiles))
    tiles_each = -(-tiles // min(tiles, wanted))
    grid = (requests * row_tiles + (1 if fill else 0), -(-tiles // tiles_each))
    chosen = indexer_logits_kernel if kernel is None else kernel(sizes)
    chosen[grid](
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
        FP8=codes,
        BLOCK_SIZE=cache.block_size,
        FILL=fill,
        DEPENDENT=ahead,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **dependent(ahead),
    )
    return out
