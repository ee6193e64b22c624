"""The ways to run the suite: the command, ``verify``, pytest by package, and pytest by import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ml4core.api import Refused
from ml4core.cli import main
from ml4core_conformance import progress
from ml4core_conformance.check import Status
from ml4core_conformance.results import CheckResult, load
from ml4core_conformance.verify import verify

FEW = "to_slots and (exact or signature)"
WAIVER = """\
[waivers."ops.exact[to_slots/int32]"]
kind = "bug"
raises = "CheckFailed"
reason = "it was once wrong"
link = "https://example.org/1"
expires = 2199-01-01
"""


@pytest.fixture
def ml4(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Runs ``ml4 conformance`` here, in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["conformance", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.multiprocess
def test_run_writes_every_report(ml4: Any, tmp_path: Path) -> None:
    words = ("--jobs", "1", "--json", "r.json", "--junit", "r.xml", "--html", "r.html")
    code, out, _ = ml4("run", "--backend", "cpu", "-k", FEW, "--seeds", "2", *words)
    assert code == 0, out
    assert "2 PASS in" in out
    assert "CONFORMANT by suite" in out
    assert "as far as it was asked for" in out
    result = load(tmp_path / "r.json")
    assert (result.plugin.backend, result.device.kind) == ("cpu", "real")
    assert result.selection.seeds == (0, 1)
    assert result.capabilities.sha256
    assert {"python", "torch"} <= result.libraries.keys()
    assert [str(each.status) for each in result.results] == ["PASS", "PASS"]
    assert ElementTree.parse(tmp_path / "r.xml").getroot().tag == "testsuites"
    assert "<title>ml4core conformance</title>" in (tmp_path / "r.html").read_text("utf-8")
    code, out, _ = ml4("report", "r.json")
    assert code == 0
    assert "2 PASS" in out
    assert ml4("report", "r.json", "--html", "all.html")[0] == 0
    assert (tmp_path / "all.html").is_file()
    code, out, _ = ml4("diff", "r.json", "r.json")
    assert (code, "nothing differs" in out) == (0, True)
    code, out, _ = ml4("matrix", "r.json", "--also", "cuda")
    assert code == 0
    assert "| `cuda` |  | NOT-RUN |" in out


@pytest.mark.multiprocess
def test_a_waiver_that_is_not_needed_fails_the_run(ml4: Any, tmp_path: Path) -> None:
    (tmp_path / "conformance.toml").write_text(WAIVER, "utf-8")
    code, out, err = ml4("run", "--backend", "cpu", "-k", FEW, "--jobs", "1")
    assert code == 1
    assert "conformance.toml" in err
    assert "waiver of ops.exact[to_slots/int32]: unexpected PASS; it has to go" in out
    assert "NOT CONFORMANT" in out


@pytest.mark.multiprocess
def test_nothing_judged_is_not_green(ml4: Any) -> None:
    """What is provisional gates nothing."""
    code, out, _ = ml4("run", "--backend", "cpu", "-k", "perf.topk_length")
    assert code == 5
    assert "NOTHING JUDGED" in out


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("run --backend unheard", 3, "unheard"),
        ("run --backend auto", 2, "name the backend to judge"),
        ("run --backend cpu --device odd", 2, "works: real, interpreted, fake, source"),
        ("run --backend cpu --profile fast", 2, "works: plugin, ops"),
        ("run --backend cpu -k (", 2, "works: words of check ids"),
        ("run --backend cpu -k unheard", 2, "-k 'unheard': no check matches"),
        ("run --backend cpu --profile perf -k ops", 2, "no check of profile perf matches"),
        ("run --backend cpu --api 99", 2, "judges backends of API version"),
        ("run --backend cpu --waivers none.toml", 2, "none.toml"),
        ("run", 2, "--backend"),
        ("explain unheard", 2, "no check 'unheard'"),
        ("report none.json", 2, "none.json"),
        ("selftest -k (", 2, "works: words of check ids"),
        ("selftest --device odd", 2, "works: real, interpreted, fake, source"),
        ("selftest --profile odd", 2, "no profile odd; works: plugin, ops"),
        ("selftest -k unheard", 2, "-k 'unheard': no mutant is called so"),
    ],
)
def test_wrong_command_lines(ml4: Any, words: str, code: int, told: str) -> None:
    found, out, err = ml4(*words.split())
    assert (found, out) == (code, "")
    assert told in err


def test_list_and_explain(ml4: Any) -> None:
    code, out, err = ml4("list", "-k", FEW)
    assert (code, len(out.splitlines())) == (0, 2)
    assert "2 checks" in err
    listed = json.loads(ml4("list", "-k", FEW, "--json")[1])
    assert {entry["id"] for entry in listed} == {
        "ops.exact[to_slots/int32]",
        "ops.signature[to_slots/int32]",
    }
    code, out, _ = ml4("explain", "ops.exact[to_slots/int32]")
    assert code == 0
    assert "requires: op:to_slots; else to be refused" in out
    assert "did you mean" in ml4("explain", "to_slots")[2]


@pytest.mark.multiprocess
def test_without_a_device_it_is_incomplete_and_says_why(ml4: Any) -> None:
    code, out, _ = ml4("run", "--backend", "cpu", "--device", "interpreted", "-k", FEW)
    assert code == 5
    assert "cpu has no interpreted device; works: --device real" in out


def test_verify_takes_a_name_or_an_object() -> None:
    from ml4core.registry import load as load_backend

    for backend in ("cpu", load_backend("cpu")):
        results = verify(backend, expression=FEW, jobs=0)
        assert [result.status for result in results] == [Status.PASS, Status.PASS]
    with pytest.raises(Refused, match="unheard"):
        verify("unheard")


def pytest_process(folder: Path, *words: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rsx", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.multiprocess
def test_pytest_by_package(tmp_path: Path) -> None:
    words = ("--pyargs", "ml4core_conformance", "--ml4-backend")
    code, out = pytest_process(tmp_path, *words, "cpu", "-k", "to_slots", "--ml4-jobs", "1")
    assert code == 0, out
    assert "5 passed" in out
    code, out = pytest_process(tmp_path, *words, "unheard")
    assert code != 0
    assert "unheard" in out


@pytest.mark.multiprocess
def test_pytest_by_import(tmp_path: Path) -> None:
    source = "from ml4core_conformance.suite import *\nML4_BACKEND = 'cpu'\n"
    (tmp_path / "test_conformance.py").write_text(source, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    (tmp_path / "conformance.toml").write_text(WAIVER, "utf-8")
    chosen = "exact and to_slots or waivers"
    code, out = pytest_process(tmp_path, "-k", chosen, "--ml4-jobs", "1")
    assert code == 1, out
    assert "unexpected PASS; it has to go" in out
    assert "1 failed, 1 passed" in out


@pytest.mark.multiprocess
def test_pytest_without_a_backend(tmp_path: Path) -> None:
    (tmp_path / "test_conformance.py").write_text("from ml4core_conformance.suite import *\n")
    code, out = pytest_process(tmp_path)
    assert code != 0
    assert "no backend to judge; works: --ml4-backend NAME" in out


def test_long_runs_tell_of_themselves_each_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.Progress("toy", 4) as told:
        for after, status in ((59, "PASS"), (1, "FAIL"), (59, "PASS")):
            now += after
            told.take(CheckResult(f"x{now}", "x", "ops", Status(status), reason="wrong"))
        assert told.counts() == "[green]2 PASS[/] [red]1 FAIL[/]"
    assert capsys.readouterr().err.splitlines() == ["FAIL x160.0: wrong", "2 of 4: 1 PASS, 1 FAIL"]
