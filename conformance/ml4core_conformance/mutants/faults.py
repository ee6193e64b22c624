"""Mutants of fail-stop: what a backend makes of a fault, and of a step that doesn't end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ml4core.api import StepOutput
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import AfterStep, AlteredSession, Changed, Op

_LATE_S = 1.0
"""Seconds after which a step is late to ``OlderWhenLate``: before any deadline of an engine."""


def mutants() -> list[Mutant]:
    rows: Sequence[tuple[str, str, Callable[[AlteredSession], None], tuple[str, ...]]] = (
        (
            "fault-dropped",
            "The fault of a step is dropped, and its tokens leave.",
            fault_dropped,
            ("system.fail_stop[nan]", "model.fault"),
        ),
        (
            "fault-cleared",
            "Drawing tokens clears the fault word before the host has read it.",
            fault_cleared,
            ("system.fail_stop[nan]",),
        ),
        (
            "fault-a-step-late",
            "A step tells the fault of the step before, so that its own tokens leave.",
            fault_a_step_late,
            ("system.fail_stop[nan]", "model.fault"),
        ),
        (
            "waits-for-ever",
            "A step that meets a NaN waits for someone who never comes.",
            waits_for_ever,
            ("system.fail_stop[nan]",),
        ),
        (
            "older-when-late",
            "For a step that is late it gives the results of the step before, whose tokens leave.",
            older_when_late,
            ("system.fail_stop[stall]",),
        ),
    )
    return [Mutant(name, doc, Changed(change), dies) for name, doc, change, dies in rows]


def fault_dropped(session: AlteredSession) -> None:
    def after(output: StepOutput) -> StepOutput:
        return output._replace(fault=torch.zeros_like(output.fault))

    session.executor = AfterStep(session.inner.executor, after)


def fault_cleared(session: AlteredSession) -> None:
    words: list[torch.Tensor] = []
    honest = session.honest["sample"]

    def after(output: StepOutput) -> StepOutput:
        words[:] = [output.fault]
        return output

    def sample(*args: Any) -> Any:
        for word in words:
            word.zero_()
        return honest(*args)

    clearing: Op = sample
    session.executor = AfterStep(session.inner.executor, after)
    session.ops["sample"] = clearing


def fault_a_step_late(session: AlteredSession) -> None:
    before: list[torch.Tensor] = []

    def after(output: StepOutput) -> StepOutput:
        told = before.pop() if before else torch.zeros_like(output.fault)
        before.append(output.fault.clone())
        logits = torch.where(output.logits.isnan(), 0.0, output.logits)
        return output._replace(logits=logits, fault=told)

    session.executor = AfterStep(session.inner.executor, after)


def waits_for_ever(session: AlteredSession) -> None:
    def after(output: StepOutput) -> StepOutput:
        if bool(output.fault):
            threading.Event().wait()
        return output

    session.executor = AfterStep(session.inner.executor, after)


class OlderWhenLate:
    """An executor that makes each step in a thread, and doesn't wait for long."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._last: StepOutput | None = None

    def compile(self, step: Any, shape: Any) -> Any:
        run = self._inner.compile(step, shape)

        def call(*args: Any) -> StepOutput:
            found: list[StepOutput] = []

            def work() -> None:
                with torch.inference_mode():
                    found.append(run(*args))

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(_LATE_S if self._last is not None else None)
            if found:
                self._last = found[0]
            assert self._last is not None
            return self._last

        return call

    def eager_break(self, function: Any) -> Any:
        return self._inner.eager_break(function)


def older_when_late(session: AlteredSession) -> None:
    session.executor = OlderWhenLate(session.inner.executor)
