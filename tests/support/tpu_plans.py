"""Plans of steps for layers of the TPU backend."""

from __future__ import annotations

import torch

from ml4core.api import Segment, StepPlan, StepShape

PAGE = 128
"""Tokens of a page."""


def chunk(rows: int) -> StepPlan:
    """A chunk of one request, on page 1."""
    none, groups = Segment(0, 0, 0), ("latent", "index")
    shape = StepShape(none, none, Segment(1, rows, rows), tuple((g, 1) for g in groups), 1)
    place = torch.arange(rows)
    return StepPlan(
        shape,
        place,
        place,
        torch.zeros(rows, dtype=torch.int64),
        torch.tensor([0, rows]).int(),
        (place + 1).int(),
        {group: torch.ones(1, 1).int() for group in groups},
        {group: PAGE + place for group in groups},
        torch.zeros(1, dtype=torch.int64),
    )
