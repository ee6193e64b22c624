"""What mutants are made of: an honest backend whose sessions are changed after they open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ml4core.api import (
    OPS,
    Backend,
    Candidate,
    Capabilities,
    Deployment,
    Device,
    Probe,
    Session,
    StepOutput,
)
from ml4core_conformance.offered import offered_ops

Op = Callable[..., Any]
Change = Callable[["AlteredSession"], None]
"""Changes a session that was just opened."""


class AlteredSession:
    """An honest session, of which single attributes may be replaced.

    Attributes:
        inner: the honest session.
        deployment: that it was opened for.
        honest: every op that the backend offers or has composed.
        ops: the backend's own; those that are replaced count among them.
        composed: whether stages are made of ops alone, as the backend's own go by no wrong one.
    """

    def __init__(self, inner: Session, capabilities: Capabilities, deployment: Deployment) -> None:
        self.inner = inner
        self.deployment = deployment
        self.honest: Mapping[str, Op] = offered_ops(inner, capabilities)
        self.ops: dict[str, Callable[..., Any]] = dict(inner.ops)
        self.executor = inner.executor
        self.extra: Callable[..., Sequence[Candidate]] = _none
        self.composed = False

    def providers(self, stage: str, layer: Any, shape: Any) -> Sequence[Candidate]:
        own = () if self.composed else self.inner.providers(stage, layer, shape)
        return [*self.extra(stage, layer, shape), *own]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _none(stage: str, layer: Any, shape: Any) -> Sequence[Candidate]:
    return ()


class Altered:
    """A backend that opens changed sessions. Its parts go through pickle."""

    def __init__(self, honest: Backend, change: Change | None = None) -> None:
        self.honest = honest
        self.change = change
        self._priority = honest.priority
        self._name = honest.name

    @property
    def name(self) -> str:
        return self._name

    @property
    def priority(self) -> int:
        return self._priority

    def probe(self) -> Probe:
        return self.honest.probe()

    def capabilities(self, device: Device) -> Capabilities:
        """Those of the honest one. With ``feature:compose`` every op, as any may be replaced."""
        found = self.honest.capabilities(device)
        words = {f"op:{name}" for name in OPS} if "feature:compose" in found else set()
        return replace(found, features=found.features | words)

    def open(self, deployment: Deployment) -> Session:
        inner = self.honest.open(deployment)
        capabilities = self.honest.capabilities(deployment.device)
        session = AlteredSession(inner, capabilities, deployment)
        if self.change is not None:
            self.change(session)
        return session  # type: ignore[return-value]


class Changed:
    """Makes an ``Altered`` of a backend with one change: the ``wrap`` of a mutant."""

    def __init__(self, change: Change, kind: type[Altered] = Altered) -> None:
        self.change = change
        self.kind = kind

    def __call__(self, honest: Backend) -> Backend:
        return self.kind(honest, self.change)


def nothing(session: AlteredSession) -> None:
    """Changes nothing."""


class AfterStep:
    """An executor whose steps' outputs are changed by ``after``."""

    def __init__(self, inner: Any, after: Callable[[StepOutput], StepOutput]) -> None:
        self._inner = inner
        self._after = after

    def compile(self, step: Any, shape: Any) -> Any:
        run = self._inner.compile(step, shape)
        return lambda *args: self._after(run(*args))

    def eager_break(self, function: Any) -> Any:
        return self._inner.eager_break(function)


class Ops:
    """The change of a session that replaces ops: by name, what makes the wrong op of the honest."""

    def __init__(self, **changes: Callable[[Op], Op]) -> None:
        self.changes = changes

    def __call__(self, session: AlteredSession) -> None:
        for name, change in self.changes.items():
            if name in session.honest:
                session.ops[name] = change(session.honest[name])
                session.composed = True


@dataclass(frozen=True)
class After:
    """Makes an op whose results are changed by ``change``, which is given them all."""

    change: Callable[..., Any]

    def __call__(self, honest: Op) -> Op:
        def call(*args: Any) -> Any:
            found = honest(*args)
            return self.change(*found) if isinstance(found, tuple) else self.change(found)

        return call


@dataclass(frozen=True)
class Before:
    """Makes an op whose arguments are changed by ``change``, which returns them all."""

    change: Callable[..., tuple[Any, ...]]

    def __call__(self, honest: Op) -> Op:
        return lambda *args: honest(*self.change(*args))
