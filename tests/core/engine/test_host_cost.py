"""What a step costs on the host, beside the model: an accelerator waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ml4core.engine.sampler_io import SampledToken
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.steps import StepInput, StepResult

TOKEN = SampledToken(7, None)


@dataclass
class Instant:
    """A step that takes no time."""

    draws: int = 0

    def launch(self, step: StepInput) -> Instant:
        return Instant(len(step.drawn))

    def result(self) -> StepResult:
        return StepResult([TOKEN] * self.draws, [])


@pytest.mark.slow  # a figure of an idle machine: a busy one is no failure
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("requests", "target"), [(1, 0.15e-3), (32, 0.5e-3), (256, 2e-3)])
def test_a_step_of_decodes(
    make_rig: Callable[..., Any], requests: int, target: float, overlap: bool
) -> None:
    """Targets are seconds a step on one core that nobody else uses: the best of many counts."""
    rig = make_rig(
        8000, overlap=overlap, caching=True, block_size=64, max_model_len=4000,
        max_num_seqs=256, max_num_batched_tokens=8192,
    )  # fmt: skip
    rig.core._runner = Instant()
    for i in range(requests):
        prompt = [i] * 500
        rig.core.add_request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=400))
    while len(rig.core.step()) < requests:
        pass
    best = float("inf")
    for _ in range(300):
        start = time.perf_counter()
        outputs = rig.core.step()
        best = min(best, time.perf_counter() - start)
        assert len(outputs) == requests
    assert best < target
