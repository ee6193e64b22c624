"""The suite is worth something: the honest backend passes, and each wrong one dies where it should.

This is ``ml4 conformance selftest`` on the embedded backend, run once.
"""

from __future__ import annotations

import pickle
import re

import pytest

from ml4core_conformance.catalog import all_checks
from ml4core_conformance.mutants import mutants
from ml4core_conformance.mutants.rows import ROWS
from ml4core_conformance.selftest import SelfTest, means, selftest, text
from ml4core_conformance.verify import find

BEYOND = {
    "first-expert-forgotten": "parallel.logits",
    "refuses-in-silence": "caps.under",
    "scale-rounded-down": "layout.bytes",
    "shared-noise": "spec.distribution",
    "stale-draft-cache": "stages.draft_block",
    "sum-forgotten": "parallel.logits",
    "swallows-switches": "system.refusal",
}
"""Mutants of faults that are in no row, and the family whose business each is."""


@pytest.fixture(scope="module")
def outcome() -> SelfTest:
    return selftest(find("cpu"), mutants())


@pytest.fixture(scope="module")
def dying() -> dict[str, set[str]]:
    """Mutants, and the families at which each has to die."""
    checks = all_checks()
    return {
        mutant.name: {check.family for check in checks for e in mutant.dies_at if means(e, check)}
        for mutant in mutants()
    }


def test_every_kind_of_fault_has_a_row() -> None:
    assert list(ROWS) == list(range(1, 23))


@pytest.mark.parametrize("number", ROWS)
def test_every_row_has_its_mutants(number: int, dying: dict[str, set[str]]) -> None:
    row = ROWS[number]
    families = {}
    for fault, names in row.faults.items():
        assert names, fault
        for name in names:
            families[name] = dying[name] & set(row.dies_at)
            assert families[name], f"{name} dies at no family of its row"
    assert set().union(*families.values()) == set(row.dies_at)


def test_what_else_has_to_be_noticed(dying: dict[str, set[str]]) -> None:
    for name, family in BEYOND.items():
        assert family in dying[name], name


def test_mutants_are_data() -> None:
    honest = find("cpu").target.load()
    for mutant in mutants():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.name)
        assert re.fullmatch(r"[A-Z].*\.", mutant.doc)
        assert mutant.dies_at
        assert pickle.loads(pickle.dumps(mutant.wrap))(honest).name == "cpu"


@pytest.mark.multiprocess
@pytest.mark.timeout(1200)  # four minutes on two cores that have nothing else to do
def test_the_suite_is_sound(outcome: SelfTest) -> None:
    assert outcome.passed, text(outcome)
    assert not any(trial.idle for trial in outcome.trials)


@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
def test_every_mutant_was_tried(outcome: SelfTest) -> None:
    assert [trial.mutant.name for trial in outcome.trials] == [one.name for one in mutants()]
    assert all(trial.killed_by for trial in outcome.trials)
