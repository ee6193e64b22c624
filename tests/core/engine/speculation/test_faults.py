"""What a backend may not emit stops the engine, and is told as the backend's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import DraftOutput, Verified
from ml4core.engine.sampling_params import SamplingParams

VOCAB = 320
Change = Callable[..., Any]


def accept_all(ids: Tensor, counts: Tensor) -> Verified:
    """Also what is no draft: -1 stands there."""
    return Verified(ids.clamp(min=0), torch.full_like(counts, ids.shape[1]))


VERIFIED: dict[str, tuple[Change, str]] = {
    "missing drafts": (accept_all, r"emitted 4 tokens for a window with [012] drafts; it may be"),
    "nothing": (lambda ids, counts: Verified(ids, counts * 0), "emitted 0 tokens"),
    "too many": (lambda ids, counts: Verified(ids, counts * 0 + 5), "emitted 5 tokens"),
    "no token": (lambda ids, counts: Verified(ids * 0 + VOCAB, counts), "drew 320; ids are 0 to"),
    "shape": (lambda ids, counts: Verified(ids, counts[:, None]), r"returned .*; wanted: "),
    "dtype": (lambda ids, counts: Verified(ids.int(), counts), r"returned .*; wanted: "),
}
DRAFTED: dict[str, tuple[Change, str]] = {
    "no token": (lambda ids, logits: (ids * 0 + VOCAB, logits), "drew 320; ids are 0 to 319"),
    "negative": (lambda ids, logits: (ids * 0 - 1, logits), "drew -1; ids are 0 to 319"),
    "too few": (lambda ids, logits: (ids[:, :2], logits), r"returned .*\(1, 2\).*; wanted: "),
    "dtype": (lambda ids, logits: (ids.float(), logits), r"returned .*float32.*; wanted: "),
    "logits": (lambda ids, logits: (ids, logits.double()), r"returned .*float64.*; wanted: "),
}


def fault_of(engine: Any, overlap: bool, **params: Any) -> str:
    core = engine.core
    core.overlap = overlap
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    core.add_request("a", [1, 2, 3], SamplingParams(**given))
    while core.has_work:
        core.step()
    assert core.fault is not None
    assert core.fault.code == "contract"
    assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}
    return str(core.fault.message)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("mistake", VERIFIED)
def test_a_wrong_verification(
    start: Any, overlap: bool, mistake: str, logprobs: int | None
) -> None:
    """B059."""
    engine = start(3)
    speculation, (change, told) = engine.core._runner._speculation, VERIFIED[mistake]
    judge = speculation._judge
    speculation._judge = lambda shape: lambda *given, **how: change(*judge(shape)(*given, **how))
    message = fault_of(engine, overlap, logprobs=logprobs)
    assert re.search(f"backend 'cpu', stage 'verify_and_sample' {told}", message)


@pytest.mark.parametrize("mistake", DRAFTED)
def test_wrong_drafts(start: Any, overlap: bool, mistake: str) -> None:
    engine = start(3)
    speculation, (change, told) = engine.core._runner._speculation, DRAFTED[mistake]
    propose = speculation._proposer.propose
    speculation._proposer.propose = lambda given: DraftOutput(*change(*propose(given)))
    message = fault_of(engine, overlap)
    assert re.search(f"backend 'cpu', stage 'draft_block' {told}", message)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("drawn", [-1, VOCAB])
def test_a_wrong_draw(
    start: Any, overlap: bool, drafts: int, logprobs: int | None, drawn: int
) -> None:
    engine = start(drafts)
    sampler = engine.core._runner._sampler
    sampler._draw = lambda logits, *_: torch.full((len(logits),), drawn)
    message = fault_of(engine, overlap, temperature=1.0, logprobs=logprobs)
    assert f"backend 'cpu', op 'sample' drew {drawn}; ids are 0 to 319" in message
