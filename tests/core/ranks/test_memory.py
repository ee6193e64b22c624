"""Ranks agree on the size of their caches: that of the one with the least room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ml4core.api import MemoryFigures
from ml4core.engine.llm import Engine
from ml4core.engine.memory_plan import beside_tensors
from ml4core.engine.ranks.runner import tightest
from ml4core.engine.sampling_params import SamplingParams

MIB = 2**20
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.multiprocess
def test_pools_fit_the_smallest_device(
    start: Callable[..., Engine], site: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ML4_TEST_MEMORY", "256,96")
    engine = start(
        backend="ranked",
        fill=True,
        max_num_batched_tokens=32,
        gpu_memory_utilization=0.8,
        cudagraph_capture_sizes=(1, 2),
    )
    memory = engine.report()["memory"]
    assert memory["total"] == 96 * MIB
    assert memory["agrees"]
    assert 0.7 * 96 * MIB < memory["in_all"]["taken"] <= 0.8 * 96 * MIB
    assert engine.kv_plan.nbytes == memory["pools"]["taken"] > 20 * MIB
    assert engine.report()["start_up"]["captures"] == 2 * 2
    assert len(engine.generate([[5] * 40, [1]], GREEDY)) == 2


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("full:0", r"a step of the largest size needs 2\.00 GiB, and .* are free"),
        ("full:1", r"^rank 1 of 2: CUDA out of memory\. Tried to allocate 2\.00 GiB"),
        ("load:0", r"loading the weights needs .* are free"),
    ],
)
def test_a_rank_whose_memory_runs_out_as_the_engine_starts(
    start: Callable[..., Engine],
    site: None,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    told: str,
) -> None:
    """Others wait for it meanwhile, and can't be asked for their memory."""
    monkeypatch.setenv("ML4_TEST_MEMORY", "256,256")
    monkeypatch.setenv("ML4_TEST_RANKS", what)
    with pytest.raises(MemoryError, match=told):
        start(backend="ranked", fill=True, max_num_batched_tokens=32, enforce_eager=True)


def figures(total: int, free: int, allocated: int, held: int, peak: int = 0) -> MemoryFigures:
    return MemoryFigures(total, free, allocated, held, peak)


def test_the_tightest_of_several() -> None:
    one = figures(100, 60, 20, 25, 30)
    assert tightest([one, one]) == one
    fuller = figures(100, 55, 30, 32, 31)
    joined = tightest([one, fuller])
    assert (joined.allocated, joined.peak) == (30, 31)
    for rank in (one, fuller):
        assert joined.free + joined.allocated <= rank.free + rank.allocated
        assert beside_tensors(joined) >= beside_tensors(rank)
    smaller = figures(90, 50, 20, 20)
    joined = tightest([one, smaller])
    assert joined.total == 90
    assert joined.free <= 50
    assert tightest([figures(100, 0, 10, 10), figures(100, 2, 90, 95)]).free == 0
