"""The embedded backend keeps every promise: the whole suite on it, as the command runs it."""

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


@pytest.mark.multiprocess
@pytest.mark.timeout(LIMIT_S + 60)
def test_every_check_is_run_and_green(tmp_path: Path) -> None:
    words = ("conformance", "run", "--backend", "cpu", "--json", "cpu.json")
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
    assert {found.id for found in result.results} == {check.id for check in all_checks()}
    assert [found.id for found in result.results if found.status not in GREEN] == []


def test_the_evidence_is_of_these_checks() -> None:
    """Run the suite again and commit its result when this fails: see docs/conformance.md."""
    result = load(EVIDENCE / "cpu-x86_64.json")
    assert {found.id for found in result.results} == {check.id for check in all_checks()}
    assert [found.id for found in result.results if found.status not in GREEN] == []
