"""FlashInfer as a peer: the only file that imports it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor


def flashinfer() -> Any:
    """The library. ``ImportError`` where it isn't installed."""
    return import_module("flashinfer")


def top_k(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The contract of ``topk``: ascending positions int32 [T, k] of what is visible, -1 behind,
    lens and has_nan; but which of equal scores at the border it takes is the library's choice.
    """
    import torch

    columns = scores.shape[1]
    order = torch.arange(columns, device=scores.device)
    seen = order < visible.unsqueeze(1)
    has_nan = (seen & scores.isnan()).any(-1)
    known = seen & ~scores.isnan()
    given = torch.where(known, scores, float("-inf"))
    positions = flashinfer().top_k(given, min(k, columns))[1].long()
    # What it takes for want of others may be unseen: it is moved behind the end, and cut off.
    positions = torch.where(known.gather(1, positions), positions, columns).sort(-1)[0]
    lens = known.sum(-1).clamp(max=k).to(torch.int32)
    found = torch.where(positions < columns, positions, -1).to(torch.int32)
    if k > columns:
        found = torch.nn.functional.pad(found, (0, k - columns), value=-1)
    return found, lens, has_nan
