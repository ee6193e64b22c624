"""Attention of absorbed queries over chosen slots, and the join of parts."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core.compose.ops.cache_io import read_rows, require, valid_slots
from ml4core.compose.ops.tiles import tile_size, tiles

NEG_INF = float("-inf")


def sparse_mla(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over the first lens [T] of slots [T, k]; out [T, N, L], lse fp32 [T, N]."""
    require(cache, "latent")
    size = tile_size(q.shape[0], row_bytes(cache, q, slots.shape[1]))
    order = torch.arange(slots.shape[1], device=slots.device)
    found = []
    for a, b in tiles(q.shape[0], size):
        valid = (order < lens[a:b].unsqueeze(-1)) & valid_slots(cache, slots[a:b])
        found.append(attend_slots(q[a:b], cache, slots[a:b], valid, scale))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses)


def merge_lse(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Joins ``outs`` [parts, T, N, L] with ``lses`` [parts, T, N] over disjoint sets of keys."""
    empty = lses == NEG_INF
    top = lses.amax(0)
    base = torch.where(top == NEG_INF, 0.0, top)
    weights = torch.exp(lses - base)  # 0 for an empty part
    total = weights.sum(0)
    # What an empty part holds may be anything, and 0 * NaN is NaN.
    values = torch.where(empty.unsqueeze(-1), 0.0, outs.to(torch.float32))
    out = (weights.unsqueeze(-1) * values).sum(0)
    out = out / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out.to(outs.dtype), base + torch.log(total)


def latent_width(cache: KVCache) -> int:
    """L: how many values of a row are the latent."""
    for field in cache.layout.fields:
        if field.name == "latent":
            return field.count
    raise ValueError(f"layout {cache.layout.id!r} has no field 'latent'")


def row_bytes(cache: KVCache, q: Tensor, keys: int) -> int:
    """Bytes of temporaries for attention of one row [N, W] over that many keys of its own."""
    return keys * (4 * (2 * cache.layout.width + latent_width(cache)) + 8 * q.shape[1])


def attend_slots(
    q: Tensor, cache: KVCache, slots: Tensor, valid: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``q`` [t, N, W] over the slots [t, k] that are ``valid`` [t, k]; out in q's dtype, lse."""
    keys = read_rows(cache, torch.where(valid, slots, 0))
    scores = masked_scores(q.to(torch.float32), keys, valid.unsqueeze(1), scale)
    top = scores.amax(-1, keepdim=True)
    base = torch.where(top == NEG_INF, 0.0, top)
    weights = torch.exp(scores - base)
    total = weights.sum(-1, keepdim=True)
    out = weights @ key_values(keys, latent_width(cache))
    out = out / torch.where(total == 0, 1.0, total)
    return out.to(q.dtype), (base + torch.log(total)).squeeze(-1)


def masked_scores(q: Tensor, keys: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Scores [b, n, s] of queries [b, n, W] with the first W of keys [b, s, width].

    -inf where ``mask`` [b, n or 1, s] is false, whatever the key holds.
    """
    scores = q @ keys[..., : q.shape[-1]].transpose(1, 2)
    return torch.where(mask, scores * scale, NEG_INF)


def key_values(keys: Tensor, latent: int) -> Tensor:
    """The values [b, s, L] of keys [b, s, width], with zeros for what is not finite.

    A key that isn't attended has weight 0 and may hold anything; 0 * NaN would be NaN. One that is
    attended and not finite has shown up in the scores already.
    """
    return keys[..., :latent].nan_to_num(0.0, 0.0, 0.0)
