"""Scores of the lightning indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.row_codecs import field_values
from ml4core.compose.grid import Grid
from ml4core.compose.ops.attention import NEG_INF
from ml4core.compose.ops.cache_io import read_pages, require
from ml4core.compose.ops.tiles import TEMP_BYTES, tile_size, tiles
from ml4core.formats import e4m3, kv_rows

_KEYS = 8192
"""Keys of a matrix product, about."""


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
    """Scores fp32 [T, S] of queries [T, Hi, D] with weights [T, Hi]; see the contract."""
    require(cache, "index")
    size, pages = cache.block_size, block_table.shape[1]
    if cache.layout.fp8 is None:
        q = q.to(torch.float32)
    else:
        code, q_scale = kv_rows.quantize_index(q, cache.layout.fp8)
        q = e4m3.decode(code, cache.layout.fp8)
        weights = weights * q_scale
    grid = Grid(query_start, max_rows)
    cells = grid.spread(q)  # [R, Q, Hi, D]
    factors = grid.spread(weights * scale)  # [R, Q, Hi]
    requests, rows, heads, width = cells.shape
    page_tile = tile_size(pages, size, _KEYS)
    keys = page_tile * size
    request_tile = tile_size(requests, keys * 16 * width, TEMP_BYTES // 2)
    row_tile = tile_size(rows, request_tile * keys * heads * 8, TEMP_BYTES // 2)
    by_request = []
    for r0, r1 in tiles(requests, request_tile):
        by_page = []
        for p0, p1 in tiles(pages, page_tile):
            key, key_scale = _keys(cache, block_table[r0:r1, p0:p1])
            by_row = [
                _scores(cells[r0:r1, a:b], factors[r0:r1, a:b], key)
                for a, b in tiles(rows, row_tile)
            ]
            scores = torch.cat(by_row, dim=1)  # [r, Q, s]
            by_page.append(scores if key_scale is None else scores * key_scale.unsqueeze(1))
        by_request.append(torch.cat(by_page, dim=-1))
    scores = grid.collect(torch.cat(by_request), q.shape[0])
    column = torch.arange(pages * size, device=q.device)
    return torch.where(column < visible.unsqueeze(-1), scores, NEG_INF)


def _scores(q: Tensor, factors: Tensor, keys: Tensor) -> Tensor:
    """sum_h factor * relu(q . key): [r, n, s] of [r, n, Hi, D], [r, n, Hi] and [r, s, D]."""
    dots = torch.relu(q.flatten(1, 2) @ keys.transpose(1, 2))
    dots = dots.unflatten(1, q.shape[1:3])  # [r, n, Hi, s]
    return (factors.unsqueeze(-2) @ dots).squeeze(-2)


def _keys(cache: KVCache, table: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys [r, s, D] of pages [r, b], without their scales [r, s], if the layout has any."""
    layout = cache.layout
    assert layout.decode is not None
    tokens = read_pages(cache, table.flatten())
    if layout.fp8 is None:
        keys = layout.decode(tokens, cache.scale)
        return keys.view(table.shape[0], -1, layout.width), None
    fields = {field.name: field for field in layout.fields}
    code, scale = (
        field_values(layout.parts[field.part], field, tokens[field.part])
        for field in (fields["key"], fields["scale"])
    )
    return code.reshape(table.shape[0], -1, layout.width), scale.reshape(table.shape[0], -1)
