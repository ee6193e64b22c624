"""Known public faults are checks, and a backend that has one is red at a check of its id."""

from __future__ import annotations

import re

import pytest

from ml4core.cpu.backend import CpuBackend
from ml4core_conformance.catalog import all_checks
from ml4core_conformance.check import Status
from ml4core_conformance.judge import judge
from ml4core_conformance.mutants.altered import Changed
from ml4core_conformance.subject import Subject

from .known import FAULTS, LATER, WHOLE

CHECKS = {check.id: check for check in all_checks()}


def test_the_suite_carries_these_ids_and_no_other() -> None:
    carried = {id for check in CHECKS.values() for id in check.bugs}
    assert carried == set(FAULTS) | set(WHOLE)
    assert not carried & set(LATER)
    assert all(re.fullmatch(r"B\d{3}", id) for id in {*FAULTS, *WHOLE, *LATER})


@pytest.mark.parametrize("id", FAULTS)
def test_families_that_guard_against_a_fault_say_so(id: str) -> None:
    families = {check.family for check in CHECKS.values() if id in check.bugs}
    assert set(FAULTS[id].families) <= families
    assert id in CHECKS[FAULTS[id].dies_at].bugs


@pytest.mark.parametrize("id", FAULTS)
def test_a_backend_with_the_fault_is_red(id: str) -> None:
    fault = FAULTS[id]
    backend = Changed(fault.change)(CpuBackend())
    subject = Subject(backend, backend.probe().devices[0])
    check = CHECKS[fault.dies_at]
    try:
        found = judge(subject, check)
    finally:
        subject.close()
    assert found.status in (Status.FAIL, Status.ERROR), f"{check.id}: {found.status}"
