"""The runner: every end that a check can have, and what a crash or a hang costs."""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ml4core_conformance.check import Check, Status
from ml4core_conformance.facts import find_object
from ml4core_conformance.results import CheckResult, verdict
from ml4core_conformance.runner import run, units

SOURCE = """\
import os, signal, sys, time
from ml4core.api import Capabilities, Device, Probe, Refusal, Refused, refuse_missing
from ml4core_conformance.check import Check, CheckFailed, Measure, NotRun

class Session:
    ops = {}
    bad_close = False
    def close(self):
        if self.bad_close:
            raise RuntimeError("it can not be closed")

class Backend:
    name, priority = "toy", 1
    words = frozenset({"op:topk", "kv:bf16"})
    def probe(self):
        return Probe((Device("real", "toy chip", "toy1", "cpu"),))
    def capabilities(self, device):
        return Capabilities(self.words)
    def open(self, deployment):
        refuse_missing(deployment, self.capabilities(deployment.device), self.name)
        return Session()

class Deviceless(Backend):
    def probe(self):
        return Probe((), (Refusal("toy", "driver", "not loaded"),))

class Silent(Backend):
    def open(self, deployment):
        return Session()

class OneReason(Backend):
    def open(self, deployment):
        word = sorted(deployment.needs)[:1] or ["nothing"]
        raise Refused([Refusal("toy", word[0], "no")])

def passes(subject):
    subject.measure(Measure("out elements", 1.0, 4.0, "case a, head 1"))
    subject.measure(Measure("out elements", 3.0, 4.0, "case b, head 2"))

def fails(subject):
    subject.measure(Measure("out elements", 8.0, 4.0, "case c, head 3"))

def errs(subject):
    raise KeyError("lost")

def exits(subject):
    sys.exit(3)

def not_run(subject):
    raise NotRun("needs two devices")

def crashes(subject):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(subject):
    while True:
        time.sleep(0.01)

def bad_close(subject):
    subject.session.bad_close = True

def made(name, run=None, **more):
    return Check(name, more.pop("profile", "ops"), run or globals()[name], "doc", **more)

def checks():
    return [
        made("passes"), made("fails"), made("errs"), made("exits"), made("not_run"),
        made("wants", passes, requires=frozenset({"kv:e4m3", "op:rope", "op:topk"})),
        made("has", passes, requires=frozenset({"kv:bf16"})),
        made("crashes", unit="u"), made("after_crash", passes, unit="u"),
        made("hangs", unit="v", timeout_s=0.5), made("after_hang", passes, unit="v"),
        made("bad_close", unit="w"),
        made("alone", passes, isolated=True),
        made("timed", passes, profile="perf"),
        made("plug", passes, profile="plugin"),
    ]

def slow(subject):
    time.sleep(0.2)

def many():
    return [made(f"slow{i}", slow) for i in range(200)]
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of toy backends and checks that worker processes can import too."""
    (tmp_path / "ml4_toy.py").write_text(SOURCE, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("ml4_toy")
    del sys.modules["ml4_toy"]


def judged(toy: Any, backend: Any, *, jobs: int = 2) -> dict[str, CheckResult]:
    found = find_object(backend, source=toy.checks)
    outcome = run(found.target, toy.checks(), jobs=jobs, absent=found.absent)
    assert outcome.complete
    assert [result.id for result in outcome.results] == [check.id for check in toy.checks()]
    return {result.id: result for result in outcome.results}


@pytest.mark.multiprocess
def test_every_end_of_a_check(toy: Any) -> None:
    found = judged(toy, toy.Backend())
    assert {id: str(result.status) for id, result in found.items()} == {
        "passes": "PASS",
        "fails": "FAIL",
        "errs": "ERROR",
        "exits": "ERROR",
        "not_run": "NOT-RUN",
        "wants": "UNSUPPORTED",
        "has": "PASS",
        "crashes": "FAIL",
        "after_crash": "PASS",
        "hangs": "FAIL",
        "after_hang": "PASS",
        "bad_close": "FAIL",
        "alone": "PASS",
        "timed": "PASS",
        "plug": "PASS",
    }
    (worst,) = found["passes"].measures
    assert (worst.error, worst.ratio, worst.where) == (3.0, 0.75, "case b, head 2")
    assert "error 8 is above the bound 4 (2 times) at case c, head 3" in found["fails"].reason
    assert "KeyError" in found["errs"].reason
    assert "ml4_toy.py" in found["errs"].reason
    for word in ("kv:e4m3", "op:rope"):
        assert f"{word}: needed, and not declared" in found["wants"].reason
    assert "signal SIGSEGV" in found["crashes"].reason
    assert "last words" in found["crashes"].reason or "crashes" in found["crashes"].reason
    assert "did not end within 0.5 s" in found["hangs"].reason
    assert "in hangs" in found["hangs"].reason
    assert "it can not be closed" in found["bad_close"].reason
    raised = {id: found[id].raised for id in ("fails", "errs", "crashes", "hangs")}
    assert raised == {
        "fails": "CheckFailed",
        "errs": "KeyError",
        "crashes": "ProcessDied",
        "hangs": "TimeoutError",
    }


def test_undeclared_has_to_be_refused_word_by_word(toy: Any) -> None:
    checks = [check for check in toy.checks() if check.id == "wants"]
    for backend, told in (
        (toy.Silent(), "silent support: kv:e4m3, op:rope is not declared"),
        (toy.OneReason(), "no reason names op:rope"),
    ):
        found = find_object(backend, source=toy.checks)
        (result,) = run(found.target, checks, jobs=0).results
        assert result.status is Status.FAIL
        assert told in result.reason


def test_without_a_device_only_the_plugin_is_judged(toy: Any) -> None:
    safe = [check for check in toy.checks() if check.id in ("passes", "plug", "timed")]
    found = find_object(toy.Deviceless(), source=toy.checks)
    outcome = run(found.target, safe, jobs=0, absent=found.absent)
    assert [str(result.status) for result in outcome.results] == ["NOT-RUN", "NOT-RUN", "PASS"]
    assert "driver: not loaded" in outcome.results[0].reason
    assert verdict(outcome.results) == "incomplete"


def test_in_this_process_nothing_is_isolated(toy: Any) -> None:
    checks = [check for check in toy.checks() if check.id in ("passes", "alone")]
    outcome = run(find_object(toy.Backend(), source=toy.checks).target, checks, jobs=0)
    assert [str(result.status) for result in outcome.results] == ["PASS", "NOT-RUN"]
    assert "--jobs 1" in outcome.results[1].reason


@pytest.mark.multiprocess
def test_an_interrupted_run_keeps_what_it_found(toy: Any) -> None:
    checks = toy.many()
    seen: list[str] = []

    def observe(result: CheckResult) -> None:
        seen.append(result.id)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    start = time.monotonic()
    target = find_object(toy.Backend(), source=toy.many).target
    outcome = run(target, checks, jobs=2, observe=observe)
    assert not outcome.complete
    assert time.monotonic() - start < 20
    statuses = [result.status for result in outcome.results]
    assert statuses.count(Status.PASS) >= 2
    assert statuses.count(Status.NOT_RUN) >= 150
    assert outcome.results[-1].reason == "the run was interrupted"


def test_units_share_a_process_unless_isolated(toy: Any) -> None:
    def check(name: str, **more: Any) -> Check:
        return toy.made(name, toy.passes, **more)  # type: ignore[no-any-return]

    grouped = units(
        [
            check("a", unit="x"),
            check("b"),
            check("c", unit="x"),
            check("d", unit="x", isolated=True),
        ]
    )
    assert [[each.id for each in unit] for unit in grouped] == [["a", "c"], ["b"], ["d"]]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ("", "nothing judged"),
        ("UNSUPPORTED", "nothing judged"),
        ("PASS UNSUPPORTED", "conformant"),
        ("PASS WAIVED", "conformant with waivers"),
        ("PASS NOT-RUN", "incomplete"),
        ("PASS FAIL NOT-RUN", "not conformant"),
        ("PASS ERROR", "not conformant"),
    ],
)
def test_verdict(statuses: str, expected: str) -> None:
    results = [CheckResult("x", "x", "ops", Status(word)) for word in statuses.split()]
    assert verdict(results) == expected


def test_provisional_checks_gate_nothing() -> None:
    good = CheckResult("x", "x", "ops", Status.PASS)
    new = CheckResult("y", "y", "ops", Status.FAIL, provisional=True)
    assert verdict([good, new]) == "conformant"
    assert verdict([new]) == "nothing judged"
    assert verdict([good], complete=False) == "incomplete"
    assert verdict([good], ["a waiver expired"]) == "not conformant"
    assert math.isclose(good.seconds, 0)


@pytest.mark.multiprocess
def test_an_interpreted_device_has_longer_for_a_check(toy: Any) -> None:
    """What would be late elsewhere, within the same machine's noise, isn't there."""
    target = find_object(toy.Backend(), source=toy.checks).target
    slow = toy.made("slow", timeout_s=0.1)
    assert target.limit(slow) == 0.1
    target = replace(target, device=replace(target.device, kind="interpreted"))
    assert target.limit(slow) == 1.0
    (result,) = run(target, [toy.made("hangs", timeout_s=0.1)], jobs=1).results
    assert "did not end within 1 s" in result.reason
