"""Plans as their tensors, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ml4core.api import DraftPlan, Sampling, StepPlan, StepShape

_GROUPED = ("block_tables", "slots")


def step_plan(shape: StepShape, tensors: Mapping[str, Tensor]) -> StepPlan:
    """The plan of which ``StepPlan.tensors`` are these."""
    fields: dict[str, Any] = {name: {} for name in _GROUPED}
    for name, one in tensors.items():
        field, _, group = name.partition(".")
        if group:
            fields[field][group] = one
        else:
            fields[field] = one
    return StepPlan(shape, **fields)


def draft_tensors(plan: DraftPlan) -> Sequence[Tensor]:
    return [*plan[:-1], *plan.sampling]


def draft_plan(tensors: Iterable[Tensor]) -> DraftPlan:
    """The plan of which ``draft_tensors`` are these."""
    context_positions, context_slots, anchors, slots, table, *sampling = tensors
    return DraftPlan(context_positions, context_slots, anchors, slots, table, Sampling(*sampling))
