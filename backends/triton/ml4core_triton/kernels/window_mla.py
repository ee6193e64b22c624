"""``window_mla``: attention of absorbed queries over the latest keys of their request.

Rows of a request see nearly the same keys, so a tile of queries is rows times heads of one request:
a key is read once for all of them, and few heads fill the tile with rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_triton.kernels.attend import LOG2E, attend_keys, finished, product_dtype
from ml4core_triton.kernels.latents import latent_rows, row_offsets, row_scale
from ml4core_triton.kernels.merge_lse import merge
from ml4core_triton.kernels.numeric import narrow, next_power, triton_dtype, widen
from ml4core_triton.kernels.target import units_of


@dataclass(frozen=True)
class Tiling:
    """Sizes of a launch.

    Attributes:
        queries: rows times heads of a tile.
        keys: keys of a block.
        waves: programs a multiprocessor that splits of the keys are to make.
    """

    queries: int
    keys: int
    waves: int
    warps: int
    stages: int


def tiling(queries: int, wide: bool, coded: bool) -> Tiling:
    """The default for so many rows times heads of a request: the largest that spills nothing.
    ``coded``: whether keys are FP8, whose decoding takes registers.
    """
    if wide:
        return Tiling(16, 16, 1, 4, 2)
    if queries <= 16:
        return Tiling(16, 32, 1, 4, 2)
    return Tiling(16, 64, 1, 8, 2) if coded else Tiling(32, 32, 1, 8, 1)


def shape_key(layout: str, queries: int, span: int) -> str:
    """The shape by which sizes are measured."""
    return f"{layout}, {next_power(queries)} queries, {next_power(span)} keys"


@triton.jit
def window_mla_kernel(
    q,
    rows,
    cache_scale,
    block_table,
    query_start,
    visible,
    out,
    lse,
    softmax_factor,
    count,
    requests,
    query_tiles,
    splits,
    window,
    columns,
    blocks,
    page_stride,
    row_stride,
    table_stride,
    q_row_stride,
    q_head_stride,
    out_split_stride,
    lse_split_stride,
    N: tl.constexpr,
    KIND: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BL: tl.constexpr,
    BR: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A program attends ``BM`` queries of a request, row by row and head by head, to a split of the
    keys that any of them sees. The last program of a split writes rows of no request.
    """
    split = tl.program_id(1)
    request = tl.program_id(0) // query_tiles
    column = tl.arange(0, BL)
    tail = tl.arange(0, BR)
    item = tl.arange(0, BM)
    out += split * out_split_stride
    lse += split * lse_split_stride
    if request >= requests:
        first = tl.load(query_start + requests) * N
        for at in range(first, count * N, BM):
            query = (at + item).to(tl.int64)
            fits = query < count * N
            place = out + query[:, None] * L + column[None, :]
            nothing = narrow(tl.zeros((BM, BL), tl.float32), out.dtype.element_ty)
            tl.store(place, nothing, mask=fits[:, None] & (column < L)[None, :])
            tl.store(lse + query, float("-inf"), mask=fits)
    else:
        begin = tl.load(query_start + request) * N + (tl.program_id(0) % query_tiles) * BM
        end = tl.load(query_start + request + 1) * N
        if begin < end:
            query = begin + item
            fits = query < end
            row = query // N
            place = q + row.to(tl.int64) * q_row_stride + (query % N) * q_head_stride
            q_latent = tl.load(
                place[:, None] + column[None, :],
                mask=fits[:, None] & (column < L)[None, :],
                other=0.0,
            )
            q_latent = narrow(widen(q_latent), DTYPE) if q_latent.dtype != DTYPE else q_latent
            q_rope = q_latent
            if HAS_ROPE:
                q_rope = tl.load(
                    place[:, None] + (tail + L)[None, :],
                    mask=fits[:, None] & (tail < R)[None, :],
                    other=0.0,
                )
                q_rope = narrow(widen(q_rope), DTYPE) if q_rope.dtype != DTYPE else q_rope
            key_scale = row_scale(cache_scale, KIND)
            factor = softmax_factor * key_scale
            last = tl.minimum(tl.load(visible + row, mask=fits, other=0), columns)
            first = tl.maximum(last - window, 0)
            some = last > 0
            low = tl.min(tl.where(some, first, columns), 0)
            high = tl.max(last, 0)
            # Whole blocks to a split, so that masks cut at the ends of windows only.
            each = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BK), splits) * BK
            start = low + split * each
            stop = tl.minimum(start + each, high)
            top = tl.full((BM,), float("-inf"), tl.float32)
            total = tl.zeros((BM,), tl.float32)
            summed = tl.zeros((BM, BL), tl.float32)
            table = block_table + request.to(tl.int64) * table_stride
            for at in range(start, stop, BK):
                position = at + tl.arange(0, BK)
                valid = position < stop
                page = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0)
                valid = valid & (page >= 0) & (page < blocks)
                slot = page.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
                offsets = row_offsets(tl.where(valid, slot, 0), BLOCK_SIZE, page_stride, row_stride)
                sees = (position[None, :] >= first[:, None]) & (position[None, :] < last[:, None])
                # A key that none sees may hold anything, and 0 * NaN is NaN.
                valid = valid & (tl.max(sees.to(tl.int32), 0) > 0)
                top, total, summed = attend_keys(
                    q_latent,
                    q_rope,
                    rows,
                    offsets,
                    valid,
                    sees & valid[None, :],
                    factor,
                    top,
                    total,
                    summed,
                    KIND,
                    L,
                    R,
                    BM,
                    BK,
                    BL,
                    BR,
                    HAS_ROPE,
                    DTYPE,
                    False,
                )
            summed, own_lse = finished(top, total, summed, False)
            summed = summed * key_scale
            tl.store(
                out + query.to(tl.int64)[:, None] * L + column[None, :],
                narrow(summed, out.dtype.element_ty),
                mask=fits[:, None] & (column < L)[None, :],
            )
            tl.store(lse + query, own_lse, mask=fits)


def window_mla(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
    scale: float,
    window: int | None = None,
    *,
    measured: Callable[[str, Tiling], Tiling] | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over keys max(0, visible - window) .. visible - 1 of each row's request: out
    [T, N, L] in q's dtype and lse fp32 [T, N], base e; 0 and -inf without keys. Numbers are those
    of ``sparse_mla``. ``ValueError`` for a layout that isn't read.

    ``measured`` gives the sizes of a shape, by its key, in place of the default ones.
    """
    rows = latent_rows(cache)
    count, heads, width = q.shape
    if width not in (rows.latent, rows.latent + rows.rope):
        raise ValueError(
            f"queries have {width} values; keys of {cache.layout.id!r} have {rows.latent} and "
            f"{rows.rope} of rope"
        )
    q = q if q.stride(-1) == 1 else q.contiguous()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    requests, pages = table.shape
    columns = pages * cache.block_size
    dtype = product_dtype(q, rows.rows)
    wide = dtype == torch.float32
    span = columns if window is None else min(columns, window + max_rows)
    sizes = tiling(max_rows * heads, wide, rows.coded)
    if measured is not None and not wide:
        sizes = measured(shape_key(cache.layout.id, max_rows * heads, span), sizes)
    query_tiles = max(1, -(-max_rows * heads // sizes.queries))
    blocks = max(1, -(-span // sizes.keys))
    wanted = sizes.waves * units_of(q.device) // max(1, requests * query_tiles)
    splits = max(1, min(blocks, wanted))
    alone = splits == 1
    part_dtype = q.dtype if alone else torch.float32
    parts = torch.empty(splits, count * heads, rows.latent, dtype=part_dtype, device=q.device)
    lses = torch.empty(splits, count * heads, dtype=torch.float32, device=q.device)
    if count:
        window_mla_kernel[(requests * query_tiles + 1, splits)](
            q,
            rows.rows,
            rows.scale,
            table,
            query_start.contiguous(),
            visible.contiguous(),
            parts,
            lses,
            scale * LOG2E,
            count,
            requests,
            query_tiles,
            splits,
            columns if window is None else window,
            columns,
            cache.blocks,
            rows.page_stride,
            rows.row_stride,
            table.stride(0),
            q.stride(0),
            q.stride(1),
            parts.stride(0),
            lses.stride(0),
            N=heads,
            KIND=rows.kind,
            L=rows.latent,
            R=rows.rope,
            BL=max(16, next_power(rows.latent)),
            BR=max(16, next_power(rows.rope)),
            HAS_ROPE=width > rows.latent,
            BM=sizes.queries,
            BK=sizes.keys,
            BLOCK_SIZE=cache.block_size,
            DTYPE=triton_dtype(dtype),
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )
    if alone:
        return parts.view(count, heads, rows.latent), lses.view(count, heads)
    out, lse = merge(parts, lses, q.dtype)
    return out.view(count, heads, rows.latent), lse.view(count, heads)
