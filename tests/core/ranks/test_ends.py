"""Whatever ends a rank ends all of them, and is told by one error with the rank's name."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import FaultError, Refused
from ml4core.engine.llm import Engine
from ml4core.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.multiprocess

Start = Callable[..., Engine]
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
STARTS: dict[str, tuple[type[Exception], str]] = {
    "load:1": (MemoryError, "^rank 1 of 2: backend ranked .*: the chip is full$"),
    "open:1": (Refused, r"it has no fan \(on rank 1 of 2\) \(works: a fan\)"),
    "killed at load:1": (RuntimeError, r"^rank 1 of 2: its process \d+ was ended by SIGKILL$"),
}
FAULTS: dict[str, tuple[str, int, str]] = {
    "step:1": ("exception", 1, r"^rank 1 of 2: ZeroDivisionError: in an op"),
    "step:0": ("exception", 0, r"^ZeroDivisionError: in an op"),
    "killed:1": ("rank", 1, r"^rank 1 of 2: its process \d+ was ended by SIGKILL$"),
    "fault:1": ("device", 1, "^rank 1 of 2: the chip is hot$"),
}


@pytest.fixture
def wrong(site: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda what: monkeypatch.setenv("ML4_TEST_RANKS", what)


def other(engine: Engine) -> int:
    return int(engine.report()["parallel"]["ranks"][1]["process"])


def fault_of(engine: Engine) -> Any:
    with pytest.raises(FaultError) as raised:
        engine.generate([[1, 2, 3]], LONG)
    return raised.value.fault


@pytest.mark.parametrize("what", STARTS)
def test_a_start_that_fails(start: Start, wrong: Any, what: str) -> None:
    wrong(what)
    kind, told = STARTS[what]
    with pytest.raises(kind, match=told):
        start(backend="ranked")


@pytest.mark.parametrize("what", FAULTS)
def test_a_step_that_fails(start: Start, wrong: Any, what: str) -> None:
    wrong(what)
    engine = start(backend="ranked")
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    began = time.monotonic()
    fault = fault_of(engine)
    assert time.monotonic() - began < 5
    code, rank, told = FAULTS[what]
    assert (fault.code, fault.rank) == (code, rank)
    assert re.search(told, fault.message)
    assert fault_of(engine) == fault


def test_a_rank_that_is_killed_while_nothing_runs(start: Start) -> None:
    engine = start()
    assert engine.look() is None
    (alarm,) = engine.alarms
    for number in (signal.SIGINT, signal.SIGTERM):  # as all processes of a terminal get them
        os.kill(other(engine), number)
    time.sleep(0.2)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    os.kill(other(engine), signal.SIGKILL)
    assert select.select([alarm], [], [], 5)[0]
    fault = engine.look()
    assert fault is not None
    assert "SIGKILL" in fault.message
    assert fault_of(engine) == fault


def test_a_rank_that_stalls_stops_the_engine(start: Start, wrong: Any) -> None:
    wrong("stalled:1")
    engine = start(backend="ranked", step_timeout_s=0.3)
    fault = fault_of(engine)
    assert fault.code == "timeout"
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 5


def test_a_call_that_is_broken_off_is_the_last(start: Start, wrong: Any) -> None:
    wrong("broken off:0")
    engine = start(backend="ranked", step_timeout_s=0.0)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]], LONG)
    fault = fault_of(engine)
    assert fault.code == "rank"
    assert "broken off" in fault.message


def test_engines_come_one_after_the_other(start: Start) -> None:
    first = start()
    pid = other(first)
    with pytest.raises(RuntimeError, match="in a group of ranks already"):
        start()
    first.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    first.close()
    first.close()
    second = start()
    assert other(second) != pid
    second.generate([[1, 2, 3]], SamplingParams(max_tokens=2))


PROGRAM = """
import os, signal, sys
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
args = EngineArgs(sys.argv[1], backend="cpu", tensor_parallel_size=2, max_model_len=96)
engine = open_engine(args)
print(engine.report()["parallel"]["ranks"][1]["process"], flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "code"), [("killed", -signal.SIGKILL), ("ended", 0)])
def test_no_rank_outlives_its_engines_process(
    folder: Path, alive: Callable[[int], bool], how: str, code: int
) -> None:
    """Killed, or ended without a close."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), how],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")
    pid, end = int(done.stdout), time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)
