"""Backends whose steps can be made to stop for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ml4core.api import Backend, Deployment, Session, StepOutput, StepShape
from ml4core_conformance.rigs.engines import Log, Watched

Step = Callable[..., StepOutput]


class Gate:
    """Who passes once it is shut waits until it is opened. It stays open then."""

    def __init__(self) -> None:
        self._shut = False
        self._opened = threading.Event()

    def shut(self) -> None:
        self._shut = True

    def open(self) -> None:
        self._opened.set()

    def pass_by(self) -> None:
        if self._shut:
            self._opened.wait()


class Gated(Watched):
    """A backend whose steps pass a gate: within, where they run in Python; or behind, where they
    were captured or compiled.

    Attributes:
        sessions: the backend's own, as they were opened.
    """

    def __init__(self, backend: Backend, log: Log, gate: Gate) -> None:
        super().__init__(backend, log)
        self.gate = gate
        self.sessions: list[Session] = []

    def open(self, deployment: Deployment) -> Session:
        session: Any = super().open(deployment)
        self.sessions.append(session.inner)
        session.executor = _GatedExecutor(session.inner.executor, self.gate)
        opened: Session = session
        return opened


class _GatedExecutor:
    def __init__(self, inner: Any, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate

    def compile(self, step: Step, shape: StepShape) -> Step:
        held: list[bool] = []

        def within(*args: Any) -> StepOutput:
            held.append(True)
            self._gate.pass_by()
            return step(*args)

        run = self._inner.compile(within, shape)

        def call(*args: Any) -> StepOutput:
            held.clear()
            output: StepOutput = run(*args)
            if not held:  # it ran what it has captured
                self._gate.pass_by()
            return output

        return call

    def eager_break(self, function: Any) -> Any:
        return self._inner.eager_break(function)
