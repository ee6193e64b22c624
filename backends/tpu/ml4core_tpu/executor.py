"""How steps run: as they are, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ml4core.api import StepOutput, StepShape

F = TypeVar("F", bound=Callable[..., object])
Step = Callable[..., StepOutput]


class EagerExecutor:
    """A step is itself: each op is a program of its own."""

    def compile(self, step: Step, shape: StepShape) -> Step:
        return step

    def eager_break(self, function: F) -> F:
        return function
