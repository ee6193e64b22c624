"""The drafter's rows after rejections, chunks and hits are those of a recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ml4core.compose.ops import COMPOSED
from ml4core.engine.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)


def rows(engine: Any, request: Any, first: int, end: int) -> torch.Tensor:
    """[layers, positions, width] of the drafter's cache."""
    size, pages = engine.kv_plan.block_size, request.pages["draft"]
    slots = torch.tensor([pages[p // size] * size + p % size for p in range(first, end)])
    return torch.stack([COMPOSED["gather_kv"](cache, slots) for cache in engine.runner.draft_kv])


CHUNKED = {"max_num_batched_tokens": 9}


@pytest.mark.parametrize(
    ("flags", "overlap"),
    [
        pytest.param({}, False, id="whole"),
        pytest.param(CHUNKED, False, id="chunked"),
        pytest.param(CHUNKED, True, id="chunked-overlapped"),
        pytest.param({}, True, id="whole-overlapped", marks=pytest.mark.slow),
    ],
)
def test_rows_of_accepted_tokens_equal_a_recomputation(
    start: Callable[..., Any], script: Any, flags: dict[str, Any], overlap: bool
) -> None:
    prompt = [(13 * i + 2) % 320 for i in range(37)]
    plain = start(3).generate([prompt], PARAMS)[0].token_ids
    engine = start(3, **flags)
    engine.core.overlap = overlap
    draft = engine.deployment.model.draft
    engine.core.add_request("a", prompt, PARAMS)
    seen = 0
    while engine.core.has_work:
        engine.core.step()
        running = engine.core.scheduler.running
        if not running or running[0].num_confirmed < 50 or engine.core._flight is not None:
            continue
        (request,) = running
        end = request.num_confirmed
        tokens = request.token_ids[: end + 1]
        fresh = start(3)
        fresh.core.add_request("b", tokens, replace(PARAMS, max_tokens=2))
        fresh.core.step()
        (other,) = fresh.core.scheduler.running
        assert other.num_confirmed == len(tokens)
        first = end - draft.window + 1
        ours, theirs = rows(engine, request, first, end), rows(fresh, other, first, end)
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.02, atol=0.02)
        fresh.core.abort("b")
        while fresh.core.has_work:
            fresh.core.step()
        seen += 1
        break
    if not overlap:
        assert seen == 1
    engine.core.abort("a")
    while engine.core.has_work:
        engine.core.step()
    assert engine.generate([prompt], PARAMS)[0].token_ids == plain


def test_drafts_do_not_depend_on_how_the_prompt_came(start: Callable[..., Any]) -> None:
    """Chunks, and a hit whose window is all there, give the acceptance of a whole prompt."""
    prompt = [(13 * i + 2) % 320 for i in range(64)]
    params = replace(PARAMS, temperature=0.0, max_tokens=24)
    counts = []
    for flags in ({}, CHUNKED, {"enable_prefix_caching": True}):
        engine = start(3, **flags)
        before = engine.core.stats().drafts
        for _ in range(2 if "enable_prefix_caching" in flags else 1):
            before = engine.core.stats().drafts
            engine.generate([prompt], params)
        after = engine.core.stats().drafts
        counts.append(
            (after.drafts - before.drafts, after.accepted_tokens - before.accepted_tokens)
        )
    assert counts[0] == counts[1] == counts[2]
