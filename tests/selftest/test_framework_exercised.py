"""What a check was made with is in its result, for the support matrix to show."""

from __future__ import annotations

import pytest

from ml4core.cpu.backend import CpuBackend
from ml4core_conformance.catalog import all_checks
from ml4core_conformance.check import Check, CheckFailed, Status
from ml4core_conformance.judge import judge
from ml4core_conformance.subject import Subject


@pytest.fixture
def subject() -> Subject:
    backend = CpuBackend()
    return Subject(backend, backend.probe().devices[0], small=True)


def test_words_are_those_of_one_check_and_no_ops(subject: Subject) -> None:
    def notes(subject: Subject) -> None:
        subject.exercise({"kv:bf16", "op:topk", "act:fp32", "parallel:tp"})

    def fails(subject: Subject) -> None:
        subject.exercise({"stage:ffn"})
        raise CheckFailed("no")

    noted = Check("a", "system", notes, "doc", requires=frozenset({"act:fp32"}))
    assert judge(subject, noted).exercises == ("kv:bf16",)
    failed = judge(subject, Check("b", "system", fails, "doc"))
    assert (failed.status, failed.exercises) == (Status.FAIL, ("stage:ffn",))
    silent = Check("c", "system", lambda subject: None, "doc")
    assert judge(subject, silent).exercises == ()


def test_what_steps_and_stages_run_with_is_noted(subject: Subject) -> None:
    checks = {check.id: check for check in all_checks()}
    found = judge(subject, checks["spec.greedy[verify_and_sample/1]"])
    assert found.status is Status.PASS
    assert {"stage:verify_and_sample", "act:fp32", "kv:fp32", "feature:compose"} <= set(
        found.exercises
    )
    again = judge(subject, checks["spec.greedy[verify_and_sample/2]"])
    assert again.exercises == found.exercises, "though its session is that of the one before"
