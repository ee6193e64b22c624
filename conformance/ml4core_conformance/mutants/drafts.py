"""Drafts that are verified or remembered wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Accepted, Candidate
from ml4core.compose.context import StageContext
from ml4core.compose.draft import draft_block
from ml4core.compose.ops.noise import ACCEPT, RESIDUAL, row_keys, uniform
from ml4core.engine.collectives import SingleRank
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import AlteredSession, Changed, Op, Ops


def mutants() -> list[Mutant]:
    return [
        Mutant(
            "shared-noise",
            "The number that rejects a draft also draws the token in its place.",
            Changed(Ops(verify_draft=Verifying(ACCEPT))),
            ("spec.distribution",),
        ),
        Mutant(
            "stale-draft-cache",
            "The row of the token accepted last stays what the drafter wrote for its own draft.",
            Changed(stale_rows),
            ("stages.draft_block",),
        ),
        Mutant(
            "draft-after-its-end",
            "Drafts behind one that is missing are still accepted.",
            Changed(Ops(verify_draft=beyond_the_end)),
            ("spec.greedy",),
        ),
    ]


class Verifying:
    """Makes a verification of drafts one by one whose replacements are drawn by the inverse of
    their law, from noise for ``purpose``. What it is given at temperature 0, or as a block, is the
    honest one's.
    """

    def __init__(self, purpose: int) -> None:
        self.purpose = purpose

    def __call__(self, honest: Op) -> Op:
        def call(
            logits: Tensor,
            drafts: Tensor,
            given: Tensor | None,
            heat: Tensor,
            seeds: Tensor,
            at: Tensor,
            block: bool | None = None,
        ) -> tuple[Tensor, Tensor]:
            ids, counts = honest(logits, drafts, given, heat, seeds, at, block)
            if block or not drafts.numel():
                return ids, counts
            mine = self._drawn(logits, drafts, given, heat, seeds, at)
            warm = heat > 0
            return torch.where(warm.unsqueeze(-1), mine[0], ids), torch.where(warm, mine[1], counts)

        return call

    def _drawn(
        self,
        logits: Tensor,
        drafts: Tensor,
        given: Tensor | None,
        heat: Tensor,
        seeds: Tensor,
        at: Tensor,
    ) -> tuple[Tensor, Tensor]:
        requests, rows, vocab = logits.shape
        heat = torch.where(heat > 0, heat, 1.0).view(-1, 1, 1)
        step = torch.arange(rows, device=logits.device)
        there, known = drafts >= 0, drafts.clamp(min=0)
        target = torch.softmax(logits.float() / heat, -1)
        if given is None:
            law = torch.nn.functional.one_hot(known, vocab).float()
        else:
            law = torch.softmax(given.float() / heat, -1)
        places = seeds.unsqueeze(-1), at.unsqueeze(-1) + step
        bar = uniform(row_keys(*places, ACCEPT), 1).squeeze(-1)
        odds = [x.gather(-1, known.unsqueeze(-1)).squeeze(-1) for x in (target[:, :-1], law)]
        accepted = there & (bar[:, :-1] * odds[1] < odds[0])
        kept = accepted.long().cumprod(-1).sum(-1)
        # Behind the last draft, and where there is none, nothing was rejected.
        law = torch.cat((law * there.unsqueeze(-1), torch.zeros_like(target[:, :1])), 1)
        row = torch.arange(requests, device=logits.device)
        left = (target[row, kept] - law[row, kept]).clamp(min=0)
        ends = left.cumsum(-1)
        noise = uniform(row_keys(*places, self.purpose), 1).squeeze(-1)[row, kept]
        point = noise.unsqueeze(-1) * ends[:, -1:]
        last = torch.searchsorted(ends, point, right=True).clamp(max=vocab - 1)
        ids = torch.cat((drafts, last), -1)
        ids = torch.where(step == kept.unsqueeze(-1), last, ids)
        return torch.where(step > kept.unsqueeze(-1), -1, ids), kept + 1


FRESH = Verifying(RESIDUAL)
"""The same with noise of its own: right."""


def beyond_the_end(honest: Op) -> Op:
    def call(logits: Tensor, drafts: Tensor, *more: Any) -> Any:
        best = logits.nan_to_num(-torch.inf).argmax(-1)[:, :-1]
        return honest(logits, torch.where(drafts < 0, best, drafts), *more)

    return call


def stale_rows(session: AlteredSession) -> None:
    model = session.deployment.model

    def extra(stage: str, layer: Any, shape: Any) -> Sequence[Candidate]:
        if stage != "draft_block" or model.draft is None:
            return ()
        dtype = getattr(torch, session.deployment.dtype)
        context = StageContext(model, None, session.honest, SingleRank(), dtype)
        honest = draft_block(context, {})

        def call(weights: Any, plan: Any, *more: Any) -> Any:
            newest = torch.isin(plan.context_positions + 1, plan.sampling.positions)
            slots = torch.where(newest, -1, plan.context_slots)
            return honest(weights, plan._replace(context_slots=slots), *more)

        return (Accepted("mutant", call),)

    session.extra = extra
