"""The driver of the self-test: what it calls dead, survived, vacuous and dishonest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ml4core.api import Capabilities, Deployment, Device, Probe, refuse_missing
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.facts import find_object
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.selftest import SelfTest, selftest, text
from ml4core_conformance.subject import Subject


class Closable:
    def close(self) -> None:
        return None


@dataclass
class Toy:
    """Adds, and says so."""

    error: int = 0
    name: str = "toy"
    priority: int = 1

    def probe(self) -> Probe:
        return Probe((Device("real", "toy", "toy1", "cpu"),))

    def capabilities(self, device: Device) -> Capabilities:
        return Capabilities(frozenset({"op:topk"}))

    def open(self, deployment: Deployment) -> Any:
        refuse_missing(deployment, self.capabilities(deployment.device), self.name)
        return Closable()


def wrong(backend: Any) -> Any:
    return Toy(error=1)


def harmless(backend: Any) -> Any:
    return backend


def raises(backend: Any) -> Any:
    return Toy(error=2)


def sums(subject: Subject) -> None:
    assert subject.small
    error: int = subject.backend.error  # type: ignore[attr-defined]
    if error == 2:
        raise KeyError("no sum")
    if error:
        raise CheckFailed("the sum is off by 1")


def idle(subject: Subject) -> None:
    return None


def check(name: str, run: Any, **more: Any) -> Check:
    family, _, variant = name.rstrip("]").partition("[")
    return Check(family, "ops", run, "doc", variant=variant, **more)


def sound() -> list[Check]:
    return [check("sums[a]", sums), check("sums[b]", sums), check("new", idle, provisional=True)]


def with_idle() -> list[Check]:
    return [*sound(), check("idle", idle)]


def with_broken() -> list[Check]:
    def broken(subject: Subject) -> None:
        raise CheckFailed("the honest one fails")

    return [*sound(), check("sums[c]", broken)]


WRONG = Mutant("wrong", "adds 1", wrong, ("sums",))


def tried(source: Any, *mutants: Mutant, **how: Any) -> SelfTest:
    return selftest(find_object(Toy(), source=source), mutants, jobs=0, **how)


def test_a_sound_suite() -> None:
    outcome = tried(sound, WRONG)
    assert outcome.passed
    (trial,) = outcome.trials
    assert trial.killed_by == {"sums"}
    # It ends at the first that it dies at.
    assert [str(result.status) for result in trial.results] == ["FAIL", "NOT-RUN"]
    assert "1 of 1 mutants dead" in text(outcome)
    assert text(outcome).endswith("SOUND\n")


def test_full_runs_all_on_each() -> None:
    (trial,) = tried(sound, WRONG, full=True).trials
    assert [str(result.status) for result in trial.results] == ["FAIL", "FAIL", "PASS"]


@pytest.mark.parametrize("dies_at", ["sums[b]", "sums"])
def test_a_survivor_is_named(dies_at: str) -> None:
    outcome = tried(sound, WRONG, Mutant("lazy", "does no harm", harmless, (dies_at,)))
    assert not outcome.passed
    assert f"SURVIVED lazy: not killed by {dies_at}" in text(outcome)
    assert "does no harm" in text(outcome)


def test_an_error_kills_nobody() -> None:
    outcome = tried(sound, WRONG, Mutant("odd", "raises", raises, ("sums",)))
    assert outcome.trials[1].survived == ("sums",)
    assert "KeyError" in text(outcome)


def test_a_check_that_kills_nobody_is_vacuous() -> None:
    outcome = tried(with_idle, WRONG)
    assert outcome.vacuous == ("idle",)
    assert not outcome.passed
    assert "VACUOUS  idle" in text(outcome)
    assert tried(with_idle, WRONG, partial=True).passed


def test_the_honest_one_has_to_pass() -> None:
    outcome = tried(with_broken, WRONG)
    assert [result.id for result in outcome.honest] == ["sums[c]"]
    assert not outcome.passed


def test_unknown_checks_and_no_mutants() -> None:
    outcome = tried(sound, WRONG, Mutant("x", "x", wrong, ("gone",)))
    assert outcome.unknown == ("gone",)
    assert not outcome.passed
    assert not tried(sound).passed
    assert not tried(list, WRONG).passed
