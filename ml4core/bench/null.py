"""A runner that computes nothing: what remains of a step is the host's part of it."""

from __future__ import annotations

from dataclasses import dataclass

from ml4core.engine.sampler_io import SampledToken
from ml4core.engine.steps import StepInput, StepResult

TOKEN = SampledToken(7, None)


@dataclass(frozen=True)
class NullStep:
    """A step that is done before it is launched: a token for each draw."""

    draws: int

    def result(self) -> StepResult:
        return StepResult([[TOKEN]] * self.draws, [])


class NullRunner:
    """Takes each step's input and looks at none of it."""

    def launch(self, step: StepInput) -> NullStep:
        return NullStep(len(step.drawn))
