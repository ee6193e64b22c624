"""Waivers: what is waived has to fail as it says, and each mistake in a waiver fails the run."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from ml4core_conformance.check import Status
from ml4core_conformance.results import CheckResult, verdict
from ml4core_conformance.waivers import WaiverError, applied, load

TODAY = date(2026, 7, 1)
GOOD = """\
[waivers."ops.elements[topk/scores]"]
kind = "bug"
raises = "CheckFailed"
reason = "the last one is lost"
link = "https://example.org/1"
expires = 2026-07-01
"""
ID = "ops.elements[topk/scores]"


def waived(tmp_path: Path, *results: CheckResult, text: str = GOOD, today: date = TODAY):  # type: ignore[no-untyped-def]
    path = tmp_path / "conformance.toml"
    path.write_text(text, "utf-8")
    return applied(results, load(path), known={ID, "other"}, today=today)


def ended(status: Status, raised: str = "", id: str = ID) -> CheckResult:
    return CheckResult(id, id, "ops", status, raised=raised, reason="why")


def test_a_known_fault_is_waived(tmp_path: Path) -> None:
    (result, other), problems = waived(
        tmp_path, ended(Status.FAIL, "CheckFailed"), ended(Status.PASS, id="other")
    )
    assert (result.status, result.reason) == (Status.WAIVED, "why")
    assert result.waiver == "bug: the last one is lost (https://example.org/1), until 2026-07-01"
    assert other.status is Status.PASS
    assert problems == ()
    assert verdict([result, other], problems) == "conformant with waivers"


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (ended(Status.PASS), "unexpected PASS; it has to go"),
        (ended(Status.UNSUPPORTED), "unexpected UNSUPPORTED"),
        (ended(Status.ERROR, "KeyError"), "ends with KeyError, and the waiver says CheckFailed"),
    ],
)
def test_what_is_not_as_it_says_fails_the_run(
    tmp_path: Path, result: CheckResult, told: str
) -> None:
    (after,), (problem,) = waived(tmp_path, result)
    assert told in problem
    assert after == result
    assert verdict([after], [problem]) == "not conformant"


def test_past_its_day_it_fails_the_run(tmp_path: Path) -> None:
    failed = ended(Status.FAIL, "CheckFailed")
    (after,), (problem,) = waived(tmp_path, failed, today=date(2026, 7, 2))
    assert after == failed
    assert problem == f"waiver of {ID}: expired on 2026-07-01"


def test_an_unknown_id_fails_the_run(tmp_path: Path) -> None:
    text = GOOD.replace("topk/scores", "topk/stores")
    _, (problem,) = waived(tmp_path, ended(Status.PASS), text=text)
    assert "no check of the suite has this id" in problem


def test_a_check_that_the_run_left_out_is_not_judged(tmp_path: Path) -> None:
    assert waived(tmp_path, ended(Status.PASS, id="other"))[1] == ()
    assert waived(tmp_path, ended(Status.NOT_RUN, "NotRun"))[1] == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = [", "conformance.toml"),
        ("[other]\na = 1\n", "unknown table 'other'"),
        ("waivers = 3\n", "a table for each check id"),
        ("[waivers]\nx = 3\n", "x: works: a table with kind, raises"),
        (GOOD.replace('"bug"', '"laziness"'), "kind 'laziness'; works: bug, upstream, hardware"),
        (GOOD.replace("2026-07-01", '"soon"'), "expires 'soon'; works: a date"),
        (GOOD.replace("2026-07-01", "2026-07-01T00:00:00"), "works: a date"),
        (GOOD.replace("link =", "lonk ="), "lacks link"),
        (GOOD.replace('"the last one is lost"', '" "'), "reason ' '; works: a text"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(WaiverError) as refused:
        waived(tmp_path, text=text)
    assert told in str(refused.value)
