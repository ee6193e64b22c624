"""The suite on a device that tells of its memory, where a start tries its steps first."""

from __future__ import annotations

import pytest

from ml4core.registry import select
from ml4core_conformance.checks import engine
from ml4core_conformance.subject import Subject
from support.metered import GIB, Meter, Metered, metered

pytestmark = pytest.mark.usefixtures("probed_once")

CHECKS = {check.id: check for check in engine.checks()}


@pytest.mark.parametrize("name", ["model.engine[preempted]", "model.kv_bytes[engine]"])
def test_caches_of_trials_are_not_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = select("cpu")
    sessions: list[Metered] = []
    metered(plain, Meter(total=4 * GIB), monkeypatch, sessions=sessions)
    CHECKS[name].run(Subject(plain.backend, plain.devices[0].device))
    assert sessions[-1].executor.ran, "no step was tried"
