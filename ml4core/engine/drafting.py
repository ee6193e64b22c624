"""The checkpoint's drafter as a proposer: its rows in the draft group, and blocks behind them."""

from __future__ import annotations

import torch

from ml4core.api import DRAFT_GROUP, DraftOutput, DraftPlan
from ml4core.engine.runner import ModelRunner
from ml4core.engine.speculation import Drafting


class ModelProposer:
    """Stores the rows of accepted tokens, chunks of prompts included, and drafts where a request
    has drawn. A row without a page, below the window at the step's end, is not stored.
    """

    def __init__(self, runner: ModelRunner, depth: int) -> None:
        """``depth``: rows of the drafter's block, each of which gives a draft."""
        self._runner = runner
        self._depth = depth

    def propose(self, drafting: Drafting) -> DraftOutput:
        plan = drafting.plan
        context = torch.where(drafting.accepted, plan.slots[DRAFT_GROUP], -1)
        requests = drafting.anchors.shape[0]
        table = plan.block_tables[DRAFT_GROUP][:requests]
        position = drafting.sampling.positions.unsqueeze(-1)
        position = position + torch.arange(self._depth, device=table.device)
        size = self._runner.block_size
        pages = table.gather(1, (position // size).clamp(max=table.shape[1] - 1))
        drafts = (drafting.drafts.unsqueeze(-1) & (pages > 0)).all(1, keepdim=True)
        slots = torch.where(drafts, pages.to(torch.int64) * size + position % size, -1)
        draft_plan = DraftPlan(
            plan.positions,
            context,
            drafting.anchors,
            slots,
            torch.where(drafts, table, 0),
            drafting.sampling,
        )
        return self._runner.draft(draft_plan, drafting.taps)
