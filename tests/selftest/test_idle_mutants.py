"""What a mutant may name, and what becomes of it where the honest backend supports none of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ml4core.api import Capabilities, Deployment, Device, Probe, refuse_missing
from ml4core_conformance.catalog import all_checks
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.facts import find_object
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants import mutants
from ml4core_conformance.selftest import means, selftest, text, within
from ml4core_conformance.subject import Subject


@dataclass
class Adds:
    """Serves ``op:topk`` alone, and adds as it is told."""

    error: int = 0
    name: str = "adds"
    priority: int = 1

    def probe(self) -> Probe:
        return Probe((Device("real", "adds", "adds1", "cpu"),))

    def capabilities(self, device: Device) -> Capabilities:
        return Capabilities(frozenset({"op:topk"}))

    def open(self, deployment: Deployment) -> Any:
        refuse_missing(deployment, self.capabilities(deployment.device), self.name)
        return self

    def close(self) -> None:
        return None


def wrong(backend: Any) -> Any:
    return Adds(error=1)


def judged(subject: Subject) -> None:
    if subject.backend.error:  # type: ignore[attr-defined]
        raise CheckFailed("it adds 1")


def checks() -> list[Check]:
    def made(family: str, variant: str, word: str) -> Check:
        return Check(family, "ops", judged, "doc", variant=variant, requires=frozenset({word}))

    return [
        made("ops.sum", "topk/a", "op:topk"),
        made("ops.sum", "rope/a", "op:rope"),
        made("ops.other", "rope/a", "op:rope"),
    ]


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        ("ops.sum", 2),
        ("ops.sum[topk/a]", 1),
        ("ops.sum[rope/*]", 1),
        ("ops.*[rope/*]", 2),
        ("ops.sum[top]", 0),
        ("ops.su", 0),
    ],
)
def test_entries(entry: str, meant: int) -> None:
    assert sum(means(entry, check) for check in checks()) == meant


def test_idle_is_neither_dead_nor_alive() -> None:
    both = [
        Mutant("served", "Adds 1.", wrong, ("ops.sum[topk/*]",)),
        Mutant("unserved", "Adds 1.", wrong, ("ops.other[rope/*]",)),
    ]
    outcome = selftest(find_object(Adds(), source=checks), both, jobs=0)
    assert outcome.passed
    assert [trial.idle for trial in outcome.trials] == [(), ("ops.other[rope/*]",)]
    assert "1 of 2 mutants dead, 1 idle; 0 vacuous families" in text(outcome)


def test_idle_is_only_what_nobody_could_show() -> None:
    """A family of which something is supported has to be shown by that."""
    lazy = Mutant("lazy", "Does no harm.", Same(), ("ops.sum",))
    outcome = selftest(find_object(Adds(), source=checks), [lazy], jobs=0)
    assert not outcome.passed
    assert outcome.trials[0].survived == ("ops.sum",)
    assert outcome.vacuous == ("ops.other", "ops.sum")


class Same:
    def __call__(self, backend: Any) -> Any:
        return backend


def test_mutants_of_some_profiles_are_those_that_die_there_alone() -> None:
    checks = all_checks()
    chosen = [one.name for one in within(mutants(), checks, ("ops", "layouts"))]
    profile = {check.id: check.profile for check in checks}
    for mutant in mutants():
        meant = {profile[one.id] for one in checks for e in mutant.dies_at if means(e, one)}
        assert (mutant.name in chosen) == (meant <= {"ops", "layouts"}), mutant.name
    assert 0 < len(chosen) < len(mutants())
