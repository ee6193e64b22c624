"""What a step takes from the one before while that is still running: its tokens, and by how many
rows it was planned too far ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ml4core.api import StepPlan
from ml4core.engine.transfers import upload


class Made(NamedTuple):
    """What a step's draws gave, on the device.

    Attributes:
        ids: [D, Q] int64, -1 behind the emitted tokens.
        counts: [D] int64, emitted tokens; None: one each.
        drafts: [D, N] int64, for the places behind them.
    """

    ids: Tensor
    counts: Tensor | None = None
    drafts: Tensor | None = None


class Feed(NamedTuple):
    """Rows of a plan whose tokens the step before it makes.

    Attributes:
        rows: the plan's rows.
        draws: of each, the draw that gives its token, and
        nth: the newest token (0), or its nth draft.
        requests: the plan's requests that follow a verify window of the step before,
        after: the draw of each, and
        expected: the count of tokens that it was taken to emit.
    """

    rows: list[int]
    draws: list[int]
    nth: list[int]
    requests: list[int]
    after: list[int]
    expected: list[int]


def feed_plan(plan: StepPlan, feed: Feed, made: Made, block_size: int, vocab_size: int) -> None:
    """Puts the tokens into the plan, and moves the rows of each request to where they belong."""
    device = plan.token_ids.device
    columns = (feed.rows, feed.draws, feed.nth, feed.requests, feed.after, feed.expected)
    sent = upload([np.array(column, np.int64) for column in columns], device)
    rows, draws, nth, requests, after, expected = sent
    tokens = made.ids
    if made.counts is not None:
        tokens = tokens.gather(1, (made.counts - 1).unsqueeze(-1))
    if made.drafts is not None:
        tokens = torch.cat((tokens, made.drafts), dim=1)
    # An id that no vocabulary has must not reach beyond the table: the host will refuse it.
    fed = tokens[draws, nth].clamp(0, vocab_size - 1)
    plan.token_ids.index_copy_(0, rows, fed)
    if not feed.requests:
        return
    assert made.counts is not None, "only a verify window emits what nobody can foresee"
    shift = torch.zeros(plan.shape.requests, dtype=torch.int64, device=device)
    shift.index_copy_(0, requests, expected - made.counts[after])
    real = plan.visible > 0
    by = torch.where(real, shift[plan.row_request], 0)
    plan.positions.sub_(by)
    plan.visible.sub_(by)
    page, within = plan.positions // block_size, plan.positions % block_size
    for group, table in plan.block_tables.items():
        found = table[plan.row_request, page].to(torch.int64)
        slots = torch.where(real & (found > 0), found * block_size + within, -1)
        plan.slots[group].copy_(slots)
