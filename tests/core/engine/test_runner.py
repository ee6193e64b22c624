"""The runner keeps the programs of the shapes used last, and no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from ml4core.api import Deployment, Segment, StepShape
from ml4core.cpu.backend import CpuBackend
from ml4core.engine import programs
from ml4core.engine.runner import ModelRunner
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded_config import PRESETS

NONE = Segment(0, 0, 0)


@dataclass
class Compiler:
    """An executor that only counts."""

    compiled: list[int] = field(default_factory=list)

    def compile(self, step: Any, shape: StepShape) -> Any:
        self.compiled.append(shape.rows)
        return step

    def eager_break(self, function: Any) -> Any:
        return function


def shape(rows: int) -> StepShape:
    return StepShape(NONE, NONE, Segment(1, rows, rows), (("latent", 4), ("index", 4)), 1)


def test_programs_are_bounded_and_the_one_used_longest_ago_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 4)
    backend = CpuBackend()
    device = backend.probe().devices[0]
    deployment = Deployment(build_model_spec(PRESETS["micro"].params()), device)
    session = backend.open(deployment)
    session.executor = executor = Compiler()
    runner = ModelRunner(session, "cpu", deployment, backend.capabilities(device))

    def ask(*rows: int) -> list[int]:
        executor.compiled.clear()
        for count in rows:
            assert runner.choices(shape(count))
        return list(executor.compiled)

    assert ask(1, 2, 3, 4, 1) == [1, 2, 3, 4]
    assert ask(5) == [5]
    assert ask(1, 3, 4, 5) == []
    assert ask(2) == [2]
    assert len(runner._bound._recent) == 4
    ask(*range(10, 60))
    assert len(runner._bound._recent) == 4


def test_pinned_programs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
    kept: programs.Programs[int, str] = programs.Programs(lambda key: key < 10)
    made: list[int] = []

    def get(key: int) -> str:
        return kept.get(key, lambda: made.append(key) or str(key))

    assert [get(key) for key in (1, 2, 3, 10, 11, 12)] == ["1", "2", "3", "10", "11", "12"]
    made.clear()
    assert [get(key) for key in (1, 2, 3, 11, 12)] == ["1", "2", "3", "11", "12"]
    assert made == []
    get(10)
    assert made == [10], "of others those used last"
    kept.clear()
    made.clear()
    get(1)
    assert made == [1]
