"""Replicas make the tokens that one engine makes alone, whatever the others do meanwhile; and none
outlives another.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.multiprocess

PROMPTS = [[5] * 20, list(range(100, 140)), [7, 8, 9]]
TOKENS = 8
BOUND_S = 20.0
"""Until all have stopped; each step has far less to do."""
Alone = Callable[..., list[list[int]]]


def opened(*replicas: Any) -> list[dict[str, Any]]:
    said = [one.hear() for one in replicas]
    assert [word for word, *_ in said] == ["open"] * len(replicas), said
    return [report for _, report in said]


def answers(replica: Any, count: int) -> dict[str, list[int]]:
    return dict(replica.hear()[:2] for _ in range(count))


def check_tokens(first: Any, second: Any, want: list[list[int]]) -> None:
    """One idle and one busy, either way, then both: prompts in chunks beside decodes."""
    second.ask("a", PROMPTS[2], TOKENS)
    assert answers(second, 1) == {"a": want[2]}
    first.ask("b", PROMPTS[0], TOKENS)
    second.ask("c", PROMPTS[1], TOKENS)
    second.ask("d", PROMPTS[2], TOKENS)
    assert answers(first, 1) == {"b": want[0]}
    assert answers(second, 2) == {"c": want[1], "d": want[2]}


def check_end(replica: Any, text: str) -> None:
    began = time.monotonic()
    word, code, told = replica.hear()
    assert time.monotonic() - began < BOUND_S
    assert (word, code) == ("fault", "replica")
    assert text in told
    assert [replica.hear(), replica.hear()] == [["closed"], ["gone"]]


def test_unlike_loads_with_drafts(launch: Any, alone: Alone) -> None:
    """Experts of each on the other; the drafter's caches are stored by idle ones, too."""
    flags = {"enable_expert_parallel": True, "enable_ep_weight_filter": True}
    first, second = launch(speculative_config={"method": "dspark"}, **flags)
    want = alone(PROMPTS, TOKENS)
    reports = opened(first, second)
    assert [one["data_parallel_rank"] for one in reports] == [0, 1]
    check_tokens(first, second, want)
    first.ask("long", PROMPTS[0], 70)  # both are in a step, or about to be
    second.process.kill()
    check_end(first, "replica 1 of 2: ")


def test_ranks_of_two_replicas(launch: Any, alone: Alone, folder: Path) -> None:
    flags = {"model": str(folder), "tensor_parallel_size": 2, "enable_expert_parallel": True}
    first, second = launch(**flags)
    want = alone(PROMPTS, TOKENS, model=str(folder))
    reports = opened(first, second)
    check_tokens(first, second, want)
    second.ask("long", PROMPTS[0], 70)
    os.kill(reports[0]["ranks"][1]["process"], signal.SIGKILL)
    word, code, told = first.hear()
    assert (word, code) == ("fault", "rank")
    assert "rank 1 of 2: its process" in told
    word, code, told = second.hear()
    assert (word, code) == ("fault", "rank")
    assert told.startswith("replica 0 of 2: rank 1 of 2: its process")
