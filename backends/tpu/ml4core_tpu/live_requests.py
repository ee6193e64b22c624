"""Plans whose shape is that of several hosts: requests of each, of which one host has few."""

from __future__ import annotations

from dataclasses import replace

import torch

from ml4core.api import StepPlan


def live_requests(plan: StepPlan, most: int) -> StepPlan:
    """The plan with the requests alone that have rows which see something, where it has more than
    ``most`` and that leaves no more; else as it is. Its rows and its shape stay.

    Rows of a request that was left out, all of which see nothing, go to the one before it.
    """
    if len(plan.query_start) - 1 <= most:
        return plan
    live = torch.unique(plan.row_request[plan.visible > 0])
    if len(live) > most:
        return plan
    kept = live if len(live) else live.new_zeros(1)
    starts = torch.cat((plan.query_start[kept], plan.query_start[-1:]))
    starts[0] = 0
    owner = torch.searchsorted(kept, plan.row_request, right=True) - 1
    return replace(
        plan,
        query_start=starts,
        row_request=owner.clamp(min=0).to(plan.row_request.dtype),
        block_tables={group: table[kept] for group, table in plan.block_tables.items()},
    )
