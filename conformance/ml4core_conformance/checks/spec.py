"""Verification of drafts: greedy runs exactly, the law of all others the target's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    Sampling,
    Segment,
    StepShape,
    Verified,
)
from ml4core_conformance import tiny
from ml4core_conformance.check import Check, is_slow
from ml4core_conformance.distribution import chi_square
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.expected import Exact, Law
from ml4core_conformance.oracle.sampling import law, sample, sequences, verify_draft
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.plans import NO_ROWS
from ml4core_conformance.rigs.rig import DEFAULT, Rig
from ml4core_conformance.rigs.scenes import global_stage
from ml4core_conformance.subject import Subject

VOCAB = 4
REQUESTS = 20_000
"""Draws of a law: a share of 1 in 40 that goes the wrong way is seen."""


_LAWS = (
    (0, "sampled"),
    (1, "drafted"),
    (2, "drafted"),
    (3, "drafted"),
    (2, "certain"),
    (2, "equal"),
)
"""Depth; and whether drafts come with their law, count as certain, or have the target's law."""


def checks() -> list[Check]:
    found = [
        Check(
            "spec.greedy",
            "model",
            partial(greedy, depth),
            "At temperature 0 the stage emits the target's own tokens: the drafts that agree, then "
            "one more; ties go to the lowest id, and a missing draft ends the run.",
            variant=f"verify_and_sample/{depth}",
            unit="spec/verify",
        )
        for depth in range(4)
    ]
    found += [
        Check(
            "spec.distribution",
            "model",
            partial(distribution, depth, kind),
            "Whatever the drafts' law, emitted tokens, completed by draws from the target, have "
            "the target's law; drafts of the target's own law are all accepted.",
            variant=f"verify_and_sample/{kind}{depth}",
            unit="spec/verify",
            bugs=("B058",),
        )
        for depth, kind in _LAWS
    ]
    return found


def _verifiers(subject: Subject, depth: int, requests: int) -> list[tuple[str, Any]]:
    """The stage of a model of few tokens, for ``requests`` windows."""

    def make() -> Rig:
        spec = tiny.model(layers=4, vocab=VOCAB)
        dtype = getattr(torch, subject.deployment().dtype)
        return Rig(subject, spec, tiny.weights(spec, 0, dtype), DEFAULT, blocks=2)

    rig = subject.once("spec/rig", make)
    rows = requests * (depth + 1)
    segment = Segment(requests, rows, depth + 1)
    segments = (segment, NO_ROWS) if depth == 0 else (NO_ROWS, segment)
    return global_stage(rig, "verify_and_sample", StepShape(*segments, NO_ROWS, (), rows))


def _call(
    subject: Subject,
    call: Callable[..., Verified],
    logits: Tensor,
    sampling: Sampling,
    drafts: Tensor | None,
    draft_logits: Tensor | None,
) -> Verified:
    device = subject.torch_device
    moved = Sampling(*(x.to(device) for x in sampling))
    given = [None if x is None else x.to(device) for x in (drafts, draft_logits)]
    with torch.inference_mode():
        found = call(logits.flatten(0, 1).to(device), moved, *given)
    return Verified(*(x.cpu() for x in found))


def greedy(depth: int, subject: Subject) -> None:
    for seed in subject.seeds:
        draw = Draw(seed, f"greedy/{depth}")
        requests = 24
        logits = draw.integers(requests, depth + 1, VOCAB, low=-3, high=3).float()  # with ties
        drafts = logits[:, :-1].argmax(-1)
        drafts = torch.where(
            draw.uniform(requests, depth) < 0.7,
            drafts,
            draw.integers(requests, depth, low=-1, high=VOCAB),
        )
        zero = torch.zeros(requests, dtype=torch.int64)
        sampling = Sampling(torch.zeros(requests), draw.integers(requests, high=99), zero + 7)
        for label, call in _verifiers(subject, depth, requests):
            where = f"depth {depth}, by {label}"
            found = _call(subject, call, logits, sampling, drafts if depth else None, None)
            args = {"logits": logits, "temperature": sampling.temperature, "draft_ids": drafts}
            if depth == 0:
                want = sample({}, {**args, "logits": logits[:, 0]}).results["ids"]
                assert isinstance(want, Exact)
                errors.equal("ids", found.ids, want.value.unsqueeze(-1), where)
                errors.equal("counts", found.counts, zero + 1, where)
                continue
            expected = verify_draft({}, args).results
            for name, got in (("ids", found.ids), ("counts", found.counts)):
                right = expected[name]
                assert isinstance(right, Exact)
                errors.equal(name, got, right.value, where)


def distribution(depth: int, kind: str, subject: Subject) -> None:
    for seed in subject.seeds:
        draw = Draw(seed, f"law/{kind}/{depth}", is_slow(subject.device))
        requests = draw.rows(REQUESTS)
        for temperature in (1.0, 0.6):
            target = 1.5 * draw.normal(depth + 1, VOCAB)
            target[0, 1] = -torch.inf  # the drafts' law may reach where the target's doesn't
            drafted = target[:-1].clone() if kind == "equal" else 1.5 * draw.normal(depth, VOCAB)
            drafts = torch.stack(
                [_drawn(draw, law(row, temperature), requests) for row in drafted], -1
            ) if depth else None  # fmt: skip
            given = None
            if kind in ("drafted", "equal"):
                given = drafted.expand(requests, -1, -1).contiguous()
            logits = target.expand(requests, -1, -1).contiguous()
            sampling = Sampling(
                torch.full((requests,), temperature),
                torch.arange(requests) * 7919 + seed,
                torch.full((requests,), 40),
            )
            for label, call in _verifiers(subject, depth, requests):
                found = _call(subject, call, logits, sampling, drafts, given)
                where = f"depth {depth}, {kind}, temperature {temperature}, by {label}"
                _judge_law(subject, target, temperature, drafts, found, kind, where)
                if kind == "drafted" and depth == 1:
                    _judge_counts(subject, target, drafted, temperature, found, where)


def _judge_law(
    subject: Subject,
    target: Tensor,
    temperature: float,
    drafts: Tensor | None,
    found: Verified,
    kind: str,
    where: str,
) -> None:
    if kind == "equal":
        want = torch.full_like(found.counts, len(target))
        errors.equal("counts where target and draft have one law", found.counts, want, where)
    if drafts is None:
        odds = sequences([law(target[0], temperature)], lambda results: results["ids"])
    else:
        heat = torch.full((len(found.ids),), temperature)
        args = {"logits": target.unsqueeze(0), "temperature": heat, "draft_ids": drafts}
        wanted = verify_draft({"law": "tokens"}, args).results["ids"]
        assert isinstance(wanted, Law)
        odds = wanted
    cells = odds.cell({"ids": found.ids, "counts": found.counts})
    subject.measure(chi_square("emitted tokens", cells, odds.probabilities, odds.outcomes, where))


def _judge_counts(
    subject: Subject,
    target: Tensor,
    drafted: Tensor,
    temperature: float,
    found: Verified,
    where: str,
) -> None:
    """One draft is accepted as often as the two laws overlap; less is right, and slow."""
    args = {
        "logits": target.unsqueeze(0),
        "draft_logits": drafted.unsqueeze(0),
        "draft_ids": found.ids[:, :1],
        "temperature": torch.full((1,), temperature),
    }
    odds = verify_draft({"law": "counts"}, args).results["counts"]
    assert isinstance(odds, Law)
    cells = odds.cell({"counts": found.counts})
    subject.measure(chi_square("accepted drafts", cells, odds.probabilities, odds.outcomes, where))


def _drawn(draw: Draw, odds: Tensor, requests: int) -> Tensor:
    """Ids int64 [requests] of a law."""
    points = draw.uniform(requests, dtype=torch.float64)
    return torch.searchsorted(odds.cumsum(-1), points).clamp(max=len(odds) - 1)
