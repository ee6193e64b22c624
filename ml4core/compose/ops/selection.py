"""Exact top-k with one rule for ties, infinities and NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.compose.ops.ordering import LEAST, order_key
from ml4core.compose.ops.tiles import tile_size, tiles


def topk(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions int32 [T, k], lens int32 [T] and has_nan bool [T] of scores [T, S]."""
    rows, columns = scores.shape
    size = tile_size(rows, 32 * columns)
    found = [_topk(scores[a:b], visible[a:b], k) for a, b in tiles(rows, size)]
    positions, lens, has_nan = (torch.cat(parts) for parts in zip(*found, strict=True))
    return positions, lens, has_nan


def _topk(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = scores.shape
    column = torch.arange(columns, dtype=torch.int32, device=scores.device)
    seen = column < visible.unsqueeze(-1)
    nan = torch.isnan(scores)
    key = torch.where(seen & ~nan, order_key(scores), LEAST)
    # Which of several equal scores torch picks is not defined, so it only finds the k-th value.
    # The ties there are given out by position.
    border = key.topk(min(k, columns), dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = key > border
    ties = (key == border) & (key > LEAST)
    left = k - above.sum(-1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= left))
    rank = chosen.cumsum(-1, dtype=torch.int32)
    # Each position goes to its rank; those not chosen to a column that is cut off.
    target = torch.where(chosen, rank - 1, k).to(torch.int64)
    positions = torch.full((rows, k + 1), -1, dtype=torch.int32, device=scores.device)
    positions = positions.scatter(-1, target, column.expand(rows, columns))[:, :k]
    return positions.contiguous(), rank[:, -1].contiguous(), (seen & nan).any(-1)
