"""The device script without a device: its journal, its processes, its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ml4core_cuda import check, tuned
from ml4core_cuda.measure import report
from ml4core_cuda.measure.journal import STICKY, Journal, OutOfTime, broken, read


def test_a_step_that_was_done_is_not_done_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "journal.jsonl", []

    def work() -> dict[str, Any]:
        calls.append(1)
        return {"us": 3.5}

    assert Journal(path).do("time/a", work)["us"] == 3.5
    assert Journal(path).do("time/a", work)["us"] == 3.5
    assert len(calls) == 1
    lines = list(read(path))
    assert [line["what"] for line in lines] == ["begin", "end"]


def test_what_goes_wrong_is_a_finding(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")

    def wrong() -> dict[str, Any]:
        raise ValueError("sizes don't go together")

    assert journal.do("try/a", wrong)["failed"] == "ValueError: sizes don't go together"
    assert "failed" not in journal.do("try/b", dict)


def test_a_step_that_killed_its_process_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"what": "begin", "key": "check/a"}\n{"what": "be', "utf-8")
    facts = Journal(path).do("check/a", lambda: pytest.fail("it isn't tried again"))
    assert facts["failed"] == "the process died in it"


def test_no_step_begins_after_the_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", until=0.0)
    with pytest.raises(OutOfTime):
        journal.do("time/a", dict)


def test_errors_that_break_a_context_are_known() -> None:
    assert broken(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not broken(RuntimeError("CUDA error: out of memory"))
    assert not broken(ValueError("out of resource: shared memory"))


CHILD = """\
import os, sys
from pathlib import Path
from ml4core_cuda.measure.journal import Journal
journal = Journal(Path(sys.argv[1]))
def die():
    os._exit({code})
for name in "abcd":
    journal.do(name, die if name in "bd" else dict)
"""


@pytest.mark.parametrize("code", [STICKY, 9])
def test_fresh_processes_go_on_behind_what_broke(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    program = CHILD.format(code=code)
    started: list[Any] = []
    popen = subprocess.Popen

    def start(command: list[str], env: dict[str, str]) -> Any:
        started.append(command)
        return popen([sys.executable, "-c", program, str(path)], env=env)

    monkeypatch.setattr(check.subprocess, "Popen", start)
    words = ["--out", str(tmp_path), "--budget-s", "200"]
    options = check.parser().parse_args(words)
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert check.supervised(options, environment, 1e12) == 0
    assert len(started) == 3
    ends = {line["key"]: line for line in read(path) if line["what"] == "end"}
    assert sorted(ends) == ["a", "b", "c", "d"]
    assert ["failed" in ends[name] for name in "abcd"] == [False, True, False, True]


WORKS = [
    {"name": "topk 1", "part": "topk", "nbytes": 4_250_000, "flops": 0, "rate": 1e15,
     "target": "2x", "target_us": 2.0},
    {"name": "topk 2", "part": "topk", "nbytes": 0, "flops": 0, "rate": 1e15, "target": "",
     "target_us": 0.0},
]  # fmt: skip
SHAPE = "2048 of 65536, 1 rows"
LINES = [
    {"what": "end", "key": "device", "name": "NVIDIA Z", "torch": "2", "triton": "3"},
    {"what": "end", "key": "copy", "bytes_per_second": 4.25e12},
    {"what": "end", "key": "check/topk 1", "error": 0.0},
    {"what": "end", "key": "check/topk 2", "error": 3.0},
    {"what": "end", "key": "time/topk 1", "median_us": 4.0},
    {"what": "end", "key": "peer/topk 1/torch", "median_us": 8.0},
    {"what": "end", "key": "peer/topk 1/other", "failed": "ImportError: none"},
    {"what": "end", "key": f"tuned/topk 1/topk/{SHAPE}", "kernel": "topk", "shape": SHAPE,
     "sizes": {"first": 8192}, "us": 2.0, "default_us": 4.0},
]  # fmt: skip


def test_the_report_is_what_was_found() -> None:
    found = report.gathered(LINES, WORKS)
    first, second = found["works"]
    assert (first["best_us"], first["floor_us"], first["of_floor"]) == (2.0, 1.0, 0.5)
    assert first["peers"]["torch"] == {"median_us": 8.0}
    assert check.is_wrong(second)
    assert not check.is_wrong(first)
    text = report.table(found).splitlines()
    assert "50%" in text[1]
    assert "torch 8.0 (4.00x)" in text[1]
    assert "ImportError" in text[1]
    assert "WRONG: 3 of what is allowed" in text[2]


def test_measured_sizes_are_put_into_the_data() -> None:
    found = report.gathered(LINES, WORKS)
    tables = tuned.parse(report.measured(found, LINES))
    entry = tables["NVIDIA Z"].kernels["topk"][SHAPE]
    assert entry.sizes == {"first": 8192}
    assert (entry.us, entry.source) == (2.0, tuned.source_of("topk"))
    slow = [{**line, "us": 3.99} if "us" in line else line for line in LINES]
    again = tuned.parse(report.measured(found, slow))["NVIDIA Z"].kernels["topk"][SHAPE]
    assert again.sizes == {}  # it isn't worth leaving the default for


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_whole_script_runs_in_the_interpreter(tmp_path: Path) -> None:
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    words = ["--out", str(tmp_path), "--device", "cpu", "--only", "writes,router"]
    done = subprocess.run(
        [sys.executable, "-m", "ml4core_cuda.check", *words],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "5 works judged, 0 wrong" in done.stdout
    facts = json.loads((tmp_path / "check.json").read_text("utf-8"))
    assert {row["part"] for row in facts["works"]} == {"writes", "rest"}
    assert all(row["check"]["error"] <= 1.0 for row in facts["works"])


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_every_work_can_be_made_without_data() -> None:
    """What is compiled ahead: shapes alone."""
    program = (
        "import torch\n"
        "from ml4core_cuda.measure.suite import chosen\n"
        "from ml4core_cuda.measure.warm import _of\n"
        "works = chosen('', small=False)\n"
        "assert len({work.name for work in works}) == len(works)\n"
        "assert all(_of(work, 'sm_90') for work in works)\n"
    )
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_library_is_ruled_in_where_it_is_right_and_faster() -> None:
    def row(rows: int, ours: float, theirs: float, error: float = 0.0) -> dict[str, Any]:
        name = f"sparse_mla fp8_ds_mla 64 heads {rows} rows"
        peer = {"median_us": theirs, "error": error}
        return {"name": name, "best_us": ours, "peers": {"FlashMLA": peer}}

    rows = [row(64, 80.0, 75.0), row(1, 9.0, 17.0), row(128, 99.0, 50.0, error=2.0)]
    found = report.rules_of({"works": rows})
    assert list(found) == ["sparse_mla/64 heads"]
    assert [rule[:2] for rule in found["sparse_mla/64 heads"]] == [
        (1, "triton"),
        (64, "FlashMLA"),
        (128, "triton"),
    ]
