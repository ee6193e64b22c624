"""Rows of latent caches, in fp32 and in our own layout."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_example.layout import COLUMNS, as_columns

LAYOUTS = ("fp32", COLUMNS)


def kv_write(cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor | None = None) -> None:
    """Writes ``latent`` [T, L] and ``rope`` [T, R] to slots [T]; -1 writes nothing."""
    cache.require(*LAYOUTS)
    if not len(slots):
        return
    memory = as_rows(cache)
    rows = torch.zeros(len(slots), cache.layout.width, dtype=memory.dtype, device=memory.device)
    rows[:, : latent.shape[1]] = latent
    if rope is not None:
        rows[:, latent.shape[1] :] = rope
    # No shape may depend on data: a padded row repeats what the first real one writes, and without
    # a real one each writes back what is there.
    real = slots >= 0
    first = real.to(torch.uint8).argmax()
    slots = torch.where(real, slots, slots[first]).clamp(min=0)
    rows = torch.where(real.unsqueeze(-1), rows, rows[first])
    page, token = slots // cache.block_size, slots % cache.block_size
    memory[page, token] = torch.where(real.any(), rows, memory[page, token])


def as_rows(cache: KVCache) -> Tensor:
    """The cache's memory as [blocks, block_size, width]."""
    array = cache.parts[0]
    if cache.layout.id == COLUMNS:
        return as_columns(array, cache.layout.width).transpose(1, 2)
    return array


def read_rows(cache: KVCache, slots: Tensor) -> Tensor:
    """Rows fp32 [..., width] of slots [...] that lie in the cache."""
    slots = slots.long()
    return as_rows(cache)[slots // cache.block_size, slots % cache.block_size].float()


def valid(cache: KVCache, slots: Tensor) -> Tensor:
    """Which slots [...] lie in the cache."""
    return (slots >= 0) & (slots < cache.blocks * cache.block_size)


def gather_kv(cache: KVCache, slots: Tensor) -> Tensor:
    """Rows fp32 [..., width] of slots [...]; zeros for those outside of the cache."""
    role = cache.layout.role
    cache.require(*(LAYOUTS if role == "latent" else ("fp32",)))
    inside = valid(cache, slots)
    rows = read_rows(cache, torch.where(inside, slots, 0))
    return torch.where(inside.unsqueeze(-1), rows, 0.0)
