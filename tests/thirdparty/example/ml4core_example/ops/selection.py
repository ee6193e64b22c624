"""Top-k by two stable sorts."""

from __future__ import annotations

import torch
from torch import Tensor


def topk(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions int32 [T, k], lens int32 [T] and has_nan bool [T] of scores [T, S]."""
    rows, columns = scores.shape
    column = torch.arange(columns, device=scores.device)
    seen = column < visible.unsqueeze(-1)
    broken = seen & scores.isnan()
    usable = seen & ~broken
    # By score, equal ones by position; then those that may be chosen before those that may not.
    values = torch.where(usable, scores, -torch.inf)
    order = torch.sort(values, stable=True, dim=-1, descending=True).indices
    last = (~usable).gather(-1, order).to(torch.uint8)
    order = order.gather(-1, torch.sort(last, stable=True, dim=-1).indices)
    lens = usable.sum(-1).clamp(max=k)
    chosen = order[:, :k]
    inside = torch.arange(chosen.shape[1], device=scores.device) < lens.unsqueeze(-1)
    chosen = torch.where(inside, chosen, columns).sort(-1).values  # ascending, unused ones last
    positions = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    positions[:, : chosen.shape[1]] = torch.where(chosen < columns, chosen, -1)
    return positions, lens.to(torch.int32), broken.any(-1)
