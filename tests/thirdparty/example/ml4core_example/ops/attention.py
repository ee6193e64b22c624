"""Attention over chosen slots."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_example.ops.caches import LAYOUTS, read_rows, valid


def sparse_mla(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over the first lens [T] of slots [T, k]; out [T, N, L], lse fp32 [T, N]."""
    cache.require(*LAYOUTS)
    latent = next(field.count for field in cache.layout.fields if field.name == "latent")
    longest = int(lens.max()) if len(lens) else 0  # the host waits for it: see conformance.toml
    slots = slots[:, :longest]
    order = torch.arange(slots.shape[1], device=slots.device)
    seen = (order < lens.unsqueeze(-1)) & valid(cache, slots)
    keys = read_rows(cache, torch.where(seen, slots, 0))  # [T, k, width]
    scores = q.float() @ keys[..., : q.shape[-1]].transpose(1, 2) * scale
    scores = torch.where(seen.unsqueeze(1), scores, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1))
    # What isn't attended to may hold anything, and 0 * NaN is NaN.
    values = torch.where(seen.unsqueeze(-1), keys[..., :latent], 0.0)
    return (weights @ values).to(q.dtype), lse
