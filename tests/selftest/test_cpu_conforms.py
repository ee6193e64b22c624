"""The embedded backend keeps every promise: the suite on it, as the command runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ml4core_conformance.catalog import all_checks
from ml4core_conformance.check import Status
from ml4core_conformance.results import load

EVIDENCE = Path(__file__).resolve().parents[2] / "conformance" / "results"
LIMIT_S = 1200  # some 3 minutes on 2 free cores

GREEN = {Status.PASS, Status.UNSUPPORTED}
SAME_AS_SMALL = (
    *("model.", "parallel.", "layout.addresses"),
    *("system.fail_stop", "system.isolation", "perf.steady_state"),
)
"""Beginnings of ids whose checks are the same with the smallest cases: test_mutants.py makes each
of them on this backend, too.
"""


@pytest.mark.multiprocess
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    "left_out", [SAME_AS_SMALL, pytest.param((), marks=pytest.mark.slow)], ids=["most", "all"]
)
def test_every_check_is_run_and_green(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    words = ["conformance", "run", "--backend", "cpu", "--json", "cpu.json"]
    if left_out:
        words += ["-k", " and ".join(f"not {start}*" for start in left_out)]
    done = subprocess.run(
        [sys.executable, "-m", "ml4core", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    result = load(tmp_path / "cpu.json")
    assert result.complete
    wanted = {check.id for check in all_checks() if not check.id.startswith(left_out)}
    assert {found.id for found in result.results} == wanted
    assert len(wanted) > 1000
    assert [found.id for found in result.results if found.status not in GREEN] == []


def test_the_evidence_is_of_these_checks() -> None:
    """Run the suite again and commit its result when this fails: see docs/conformance.md."""
    result = load(EVIDENCE / "cpu-x86_64.json")
    assert {found.id for found in result.results} == {check.id for check in all_checks()}
    assert [found.id for found in result.results if found.status not in GREEN] == []
