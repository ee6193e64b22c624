"""Writing and gathering cache rows, and positions to slots."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.compose.ops.cache_io import read_rows, require, valid_slots, write_rows


def kv_write(cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor | None = None) -> None:
    """Writes ``latent`` [T, L] and ``rope`` [T, R] as rows of a latent cache, to slots [T]."""
    require(cache, "latent")
    if rope is None:
        rope = latent.new_zeros(latent.shape[0], cache.layout.width - latent.shape[1])
    rows = torch.cat((latent.to(torch.float32), rope.to(torch.float32)), dim=-1)
    write_rows(cache, slots, rows)


def indexer_write(cache: KVCache, slots: Tensor, key: Tensor) -> None:
    """Writes ``key`` [T, D] as rows of an index cache, to slots [T]."""
    require(cache, "index")
    write_rows(cache, slots, key.to(torch.float32))


def gather_kv(cache: KVCache, slots: Tensor) -> Tensor:
    """Rows fp32 [..., width] of slots [...]; zeros where a slot lies outside of the cache."""
    require(cache, cache.layout.role)
    valid = valid_slots(cache, slots)
    rows = read_rows(cache, torch.where(valid, slots, 0))
    return torch.where(valid.unsqueeze(-1), rows, 0.0)


def to_slots(
    positions: Tensor, block_table: Tensor, row_request: Tensor, block_size: int
) -> Tensor:
    """Slots int32 [T, k] of positions [T, k] in the pages of each row's request; -1 stays -1."""
    pages = block_table.shape[1]
    inside = positions.clamp(0, pages * block_size - 1).to(torch.int64)
    # [T, k] entries of the flat table.
    entry = row_request.unsqueeze(-1) * pages + inside // block_size
    page = block_table.flatten().index_select(0, entry.flatten()).view(entry.shape)
    slots = page.to(torch.int64) * block_size + inside % block_size
    return torch.where(positions < 0, -1, slots).to(torch.int32)
