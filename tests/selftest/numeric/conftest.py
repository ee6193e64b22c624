"""A backend with some ops replaced, and the checks that judge it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ml4core.api import Backend, Capabilities, Deployment, Device, Probe, Session
from ml4core.registry import load
from ml4core_conformance.check import Check, Status
from ml4core_conformance.checks import batch, ops, quantize, router, sampling
from ml4core_conformance.judge import judge
from ml4core_conformance.results import CheckResult
from ml4core_conformance.subject import Subject

Op = Callable[..., Any]


class WrappedSession:
    """Another session's, but for some ops."""

    def __init__(self, session: Session, ops: Mapping[str, Callable[[Op], Op]]) -> None:
        self._session = session
        self.ops = {name: ops[name](op) if name in ops else op for name, op in session.ops.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@dataclass
class Wrapped:
    """Another backend, but for some ops: ``ops`` makes each from the honest one."""

    honest: Backend
    ops: Mapping[str, Callable[[Op], Op]] = field(default_factory=dict)
    words: frozenset[str] = frozenset()
    name: str = "wrapped"
    priority: int = 0

    def probe(self) -> Probe:
        return self.honest.probe()

    def capabilities(self, device: Device) -> Capabilities:
        own = self.honest.capabilities(device)
        return Capabilities(own.features | self.words, own.defaults, own.limits)

    def open(self, deployment: Deployment) -> Any:
        theirs = replace(deployment, needs=deployment.needs - self.words)
        return WrappedSession(self.honest.open(theirs), self.ops)


@pytest.fixture(scope="session")
def cpu() -> Backend:
    return load("cpu")


@pytest.fixture(scope="session")
def checks() -> Mapping[str, Check]:
    made = (
        check for module in (batch, ops, quantize, router, sampling) for check in module.checks()
    )
    return {check.id: check for check in made}


@pytest.fixture
def verdict(cpu: Backend, checks: Mapping[str, Check]) -> Callable[..., CheckResult]:
    """Judges the cpu backend with ops replaced by one check."""

    def run(id: str, *, small: bool = True, words: frozenset[str] = frozenset(), **ops: Any) -> Any:
        backend = Wrapped(cpu, ops, words)
        subject = Subject(backend, cpu.probe().devices[0], small=small)
        try:
            return judge(subject, checks[id])
        finally:
            subject.close()

    return run


@pytest.fixture
def passes(verdict: Callable[..., CheckResult]) -> Callable[..., CheckResult]:
    def run(id: str, **ops: Any) -> CheckResult:
        result = verdict(id, **ops)
        assert result.status is Status.PASS, f"{id}: {result.status} {result.reason}"
        return result

    return run


@pytest.fixture
def dies(verdict: Callable[..., CheckResult]) -> Callable[..., str]:
    """The reason for which a check fails; it must fail."""

    def run(id: str, **ops: Any) -> str:
        result = verdict(id, **ops)
        assert result.status is Status.FAIL, f"{id}: {result.status} {result.reason}"
        return str(result.reason)

    return run
