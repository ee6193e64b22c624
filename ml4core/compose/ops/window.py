"""Attention of absorbed queries over the latest keys of their request."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.compose.grid import Grid
from ml4core.compose.ops.attention import (
    NEG_INF,
    attend_slots,
    key_values,
    latent_width,
    masked_scores,
    row_bytes,
)
from ml4core.compose.ops.cache_io import read_pages, require
from ml4core.compose.ops.kv import to_slots
from ml4core.compose.ops.tiles import tile_size, tiles

_QUERY_ROWS = 1024
"""Rows times heads of a matrix product: enough to be fast, few enough to keep scores small."""


def window_mla(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] of requests over their visible keys; out [T, N, L], lse fp32 [T, N]."""
    require(cache, "latent")
    columns = block_table.shape[1] * cache.block_size
    visible = visible.clamp(max=columns)
    if window is not None and max_rows * window <= columns:
        return _gather_windows(q, cache, block_table, query_start, visible, scale, window)
    grid = Grid(query_start, max_rows)
    cells = grid.spread(q.to(torch.float32))  # [R, Q, N, W]
    ends = grid.spread(visible)  # [R, Q]
    starts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    out, lse = _attend_pages(cells, cache, block_table, starts, ends, scale)
    return _rows_of(grid, out, lse, visible > 0, q)


def selected_mla(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
    scale: float,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """``sparse_mla`` by positions [T, k] of each row's request (-1: none), reading whole pages.

    Each request's keys are read once for all of its rows: cheaper than ``sparse_mla`` for chunks
    of a context that isn't much longer than k.
    """
    require(cache, "latent")
    columns = block_table.shape[1] * cache.block_size
    grid = Grid(query_start, max_rows)
    ends = grid.spread(visible.clamp(max=columns))
    wanted = grid.spread(positions).to(torch.int64)
    wanted = torch.where(wanted < 0, columns, wanted)  # a column that is cut off
    chosen = torch.zeros(*ends.shape, columns + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter(-1, wanted, True)[..., :-1]
    cells = grid.spread(q.to(torch.float32))
    starts = torch.zeros_like(ends)
    out, lse = _attend_pages(cells, cache, block_table, starts, ends, scale, chosen)
    return _rows_of(grid, out, lse, visible > 0, q)


def _rows_of(
    grid: Grid, out: Tensor, lse: Tensor, sees: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Cells as rows. A row of no request sees nothing, but the grid has no cell for it."""
    rows = q.shape[0]
    sees = sees.unsqueeze(-1)
    lse = torch.where(sees, grid.collect(lse, rows), NEG_INF)
    out = torch.where(sees.unsqueeze(-1), grid.collect(out, rows), 0.0)
    return out.to(q.dtype), lse


def _gather_windows(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Each row reads its own window: cheaper where the requests are long and their rows few."""
    row = torch.arange(q.shape[0], device=q.device)
    ended = row.unsqueeze(-1) >= query_start[1:]
    request = ended.sum(-1).clamp(max=block_table.shape[0] - 1)
    back = torch.arange(-window, 0, device=q.device)
    size = tile_size(q.shape[0], row_bytes(cache, q, window))
    found = []
    for a, b in tiles(q.shape[0], size):
        end = visible[a:b].unsqueeze(-1)
        positions = end + back
        valid = (positions >= 0) & (end > 0)
        slots = to_slots(positions, block_table, request[a:b], cache.block_size)
        valid = valid & (slots >= 0) & (slots < cache.blocks * cache.block_size)
        found.append(attend_slots(q[a:b], cache, slots, valid, scale))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses)


class _State(NamedTuple):
    """Softmax over the keys so far: largest score, sum of weights, weighted sum of values."""

    top: Tensor
    total: Tensor
    out: Tensor


def _attend_pages(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    starts: Tensor,
    ends: Tensor,
    scale: float,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``q`` [R, Q, N, W] over keys starts..ends-1 [R, Q] of each request: out [R, Q, N, L], lse.

    With ``chosen`` [R, Q, S], over those of them that are chosen.
    """
    requests, rows, heads, _ = q.shape
    latent, size = latent_width(cache), cache.block_size
    pages = block_table.shape[1]
    row_tile = max(1, min(rows, _QUERY_ROWS // heads))
    key_bytes = 4 * (2 * cache.layout.width + latent) + 8 * row_tile * heads
    page_tile = tile_size(pages, size * key_bytes)
    request_tile = tile_size(requests, page_tile * size * key_bytes)
    outs, lses = [], []
    for r0, r1 in tiles(requests, request_tile):
        row_tiles = list(tiles(rows, row_tile))
        states: list[_State | None] = [None] * len(row_tiles)
        for p0, p1 in tiles(pages, page_tile):
            keys = _page_rows(cache, block_table[r0:r1, p0:p1])
            values = key_values(keys, latent)
            column = torch.arange(p0 * size, p1 * size, device=q.device)
            for i, (a, b) in enumerate(row_tiles):
                mask = column >= starts[r0:r1, a:b].unsqueeze(-1)
                mask = mask & (column < ends[r0:r1, a:b].unsqueeze(-1))
                if chosen is not None:
                    mask = mask & chosen[r0:r1, a:b, p0 * size : p1 * size]
                mask = mask.repeat_interleave(heads, dim=1)  # [r, rows * N, s]
                queries = q[r0:r1, a:b].flatten(1, 2)
                scores = masked_scores(queries, keys, mask, scale)
                states[i] = _extend(states[i], scores, values)
        done = [_finish(state) for state in states if state is not None]
        shape = (r1 - r0, rows, heads)
        outs.append(torch.cat([out for out, _ in done], dim=1).view(*shape, latent))
        lses.append(torch.cat([lse for _, lse in done], dim=1).view(shape))
    return torch.cat(outs), torch.cat(lses)


def _page_rows(cache: KVCache, table: Tensor) -> Tensor:
    """Rows [r, b * block_size, width] of pages [r, b]."""
    assert cache.layout.decode is not None
    rows = cache.layout.decode(read_pages(cache, table.flatten()), cache.scale)
    return rows.view(table.shape[0], -1, rows.shape[-1])


def _extend(state: _State | None, scores: Tensor, values: Tensor) -> _State:
    """The state after more keys: scores [r, n, s], values [r, s, L]."""
    top = scores.amax(-1, keepdim=True)
    if state is not None:
        top = torch.maximum(state.top, top)
    # Without a key so far, -inf less -inf would be NaN.
    base = torch.where(top == NEG_INF, 0.0, top)
    weights = torch.exp(scores - base)
    total = weights.sum(-1, keepdim=True)
    out = weights @ values
    if state is None:
        return _State(top, total, out)
    fade = torch.exp(state.top - base)
    return _State(top, state.total * fade + total, state.out * fade + out)


def _finish(state: _State) -> tuple[Tensor, Tensor]:
    """out [r, n, L] and lse [r, n]."""
    base = torch.where(state.top == NEG_INF, 0.0, state.top)
    out = state.out / torch.where(state.total == 0, 1.0, state.total)
    return out, (base + torch.log(state.total)).squeeze(-1)
