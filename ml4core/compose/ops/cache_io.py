"""Access to the rows of a paged cache in any layout that can encode and decode single rows.

Pages may be strided. Slots are ``page * block_size + offset``; addresses are 64 bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.api.pages import TILE, page_tokens, token_views


def require(cache: KVCache, role: str) -> None:
    """Raises ``ValueError`` unless the cache has this role and a layout of readable rows."""
    layout = cache.layout
    if layout.role != role:
        raise ValueError(f"needs a cache of role {role!r}; {layout.id!r} has role {layout.role!r}")
    if layout.encode is None or layout.decode is None:
        raise ValueError(
            f"layout {layout.id!r} states no encode and decode, so the composed ops can't read or "
            "write its rows; the backend that owns it has to give the cache ops"
        )


def valid_slots(cache: KVCache, slots: Tensor) -> Tensor:
    """Which slots [...] lie in the cache."""
    return (slots >= 0) & (slots < cache.blocks * cache.block_size)


def write_rows(cache: KVCache, slots: Tensor, rows: Tensor) -> None:
    """Writes rows [T, width] to slots [T]. A slot outside of the cache writes nothing."""
    layout, size = cache.layout, cache.block_size
    assert layout.encode is not None
    valid = valid_slots(cache, slots)
    some = valid.any()
    # A row that isn't to be written repeats the write of one that is. If there is none, all write
    # to the first slot what is there.
    order = torch.arange(slots.shape[0], device=slots.device)
    source = torch.where(valid, order, valid.to(torch.int32).argmax())
    target = torch.where(some, slots.index_select(0, source), 0).to(torch.int64)
    page, offset = target // size, target % size
    tokens = layout.encode(rows, cache.scale)
    for index, array in enumerate(cache.parts):
        values = tokens[index].index_select(0, source)
        for where, view in token_views(layout, index, array, size):
            if view.dim() == 3:
                view[page, offset] = torch.where(some, values[:, where], view[0, 0])
            else:
                tiles = values[:, where].unflatten(1, view.shape[3:])
                tiles = torch.where(some, tiles, view[0, 0, 0])
                view[page, offset // TILE, offset % TILE] = tiles


def read_rows(cache: KVCache, slots: Tensor) -> Tensor:
    """Rows fp32 [..., width] of slots [...], which must lie in the cache."""
    layout, size = cache.layout, cache.block_size
    assert layout.decode is not None
    flat = slots.flatten().to(torch.int64)
    tokens = tuple(
        _tokens(cache, index, array, flat, size).unflatten(0, slots.shape)
        for index, array in enumerate(cache.parts)
    )
    return layout.decode(tokens, cache.scale)


def read_pages(cache: KVCache, pages: Tensor) -> tuple[Tensor, ...]:
    """The tokens [n, block_size, part width] of each part of pages [n], still encoded.

    Pages outside of the cache are read as some page of it.
    """
    inside = pages.clamp(0, cache.blocks - 1)
    return tuple(
        page_tokens(cache.layout, index, array.index_select(0, inside), cache.block_size)
        for index, array in enumerate(cache.parts)
    )


def _tokens(cache: KVCache, index: int, array: Tensor, slots: Tensor, size: int) -> Tensor:
    """The tokens [n, part width] of one part."""
    if cache.layout.parts[index].order == "row" and array.is_contiguous():
        # Several times faster than indexing by page and offset.
        return array.flatten(0, 1).index_select(0, slots)
    page, offset = slots // size, slots % size
    found = [
        view[page, offset]
        if view.dim() == 3
        else view[page, offset // TILE, offset % TILE].flatten(1)
        for _, view in token_views(cache.layout, index, array, size)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)
