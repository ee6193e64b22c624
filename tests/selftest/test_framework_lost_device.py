"""The runner where a check breaks the device for its process: it costs that check's verdict alone.

What breaks is a flag of the worker process, as the state is that a driver keeps for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ml4core_conformance import runner
from ml4core_conformance.check import Status
from ml4core_conformance.facts import find_object
from ml4core_conformance.results import CheckResult

SOURCE = '''\
from ml4core.api import Capabilities, Device, Probe
from ml4core_conformance.check import Check
from ml4core_conformance.device_state import DeviceState

class Session:
    ops = {}
    breaks_on_close = False
    def close(self):
        State.broken = State.broken or self.breaks_on_close

class Backend:
    name, priority = "fragile", 1
    def probe(self):
        return Probe((Device("real", "fragile chip", "toy1", "cpu"),))
    def capabilities(self, device):
        return Capabilities(frozenset({"op:topk"}))
    def open(self, deployment):
        return Session()

class State(DeviceState):
    """Lost for good to a process that has broken it; any fresh one can use it."""
    broken = False
    def lost(self, device):
        return "told late: illegal access" if State.broken else ""
    def unusable(self, device):
        return ""

class Dead(State):
    def unusable(self, device):
        return "no chip answers"

def uses(subject):
    if State.broken:
        raise RuntimeError("illegal access")

def breaks(subject):
    State.broken = True
    uses(subject)

def breaks_unseen(subject):
    State.broken = True

def breaks_on_close(subject):
    subject.session.breaks_on_close = True

def checks():
    return [
        Check(id, "ops", run, "doc", unit=unit)
        for id, run, unit in (
            ("before", uses, "u"), ("broken", breaks, "u"), ("behind", uses, "u"),
            ("broken_again", breaks, "u"), ("end_of_unit", uses, "u"),
            ("unseen", breaks_unseen, "v"), ("behind_unseen", uses, "v"),
            ("closing", breaks_on_close, "w"), ("behind_closing", uses, "x"),
        )
    ]
'''


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the stand-in, which worker processes can import too."""
    (tmp_path / "ml4_fragile.py").write_text(SOURCE, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("ml4_fragile")
    del sys.modules["ml4_fragile"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each process was to try the device first, in the order of their starts."""
    found: list[bool] = []
    make = runner.Process

    def counted(*args: Any, doubted: bool) -> Any:
        found.append(doubted)
        return make(*args, doubted=doubted)

    monkeypatch.setattr(runner, "Process", counted)
    return found


def judged(fragile: Any, state: Any, jobs: int) -> tuple[dict[str, CheckResult], list[str]]:
    """Results by id, and ids in the order in which they were told."""
    told: list[str] = []
    target = find_object(fragile.Backend(), source=fragile.checks, state=state).target
    outcome = runner.run(
        target, fragile.checks(), jobs=jobs, observe=lambda result: told.append(result.id)
    )
    assert outcome.complete
    return {result.id: result for result in outcome.results}, told


@pytest.mark.multiprocess
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_lost_device_costs_the_check_that_lost_it(
    fragile: Any, jobs: int, started: list[bool]
) -> None:
    found, told = judged(fragile, fragile.State(), jobs)
    red = {id: str(one.status) for id, one in found.items() if one.status is not Status.PASS}
    assert red == {"broken": "ERROR", "broken_again": "ERROR", "unseen": "ERROR", "closing": "FAIL"}
    assert sorted(told) == sorted([*found, "closing"]), "only what closing spoils is told twice"
    assert sum(started) <= len(red), "a fresh process for each fault"
    assert found["broken"].raised == "RuntimeError"
    assert found["broken"].reason.startswith("RuntimeError: illegal access")
    lost = "the device was lost with this check: told late: illegal access"
    assert lost in found["broken"].reason
    assert found["unseen"].raised == found["closing"].raised == "DeviceLost"
    assert found["unseen"].reason.startswith(lost)
    assert found["unseen"].reason.endswith("The check itself ended as PASS")
    assert "closing the session lost the device: told late" in found["closing"].reason


@pytest.mark.multiprocess
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_dead_device_ends_the_run(fragile: Any, jobs: int, started: list[bool]) -> None:
    found, told = judged(fragile, fragile.Dead(), jobs)
    assert found["before"].status is Status.PASS
    assert found["broken"].raised == "RuntimeError"
    for id in ("behind", "broken_again", "end_of_unit", "behind_closing"):
        assert found[id].status is Status.ERROR, id
        assert found[id].raised == "DeviceLost"
        assert "the device 'cpu' is dead: after" in found[id].reason
        assert "3 fresh processes in a row could not compute there" in found[id].reason
        assert found[id].reason.endswith("the last one because: no chip answers")
    assert set(told) == set(found)
    assert started[:jobs] == [False] * jobs
    assert runner.TRIES <= sum(started) < runner.TRIES + jobs
