"""Installed plugins that are broken: each has a verdict with its reason, and the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ml4core_conformance.results import Result, load

SOURCE = """\
import os, signal, time
from ml4core.api import Capabilities, Device, Probe, hookimpl, refuse_missing
{top}

class Session:
    ops, layouts, collectives = {{}}, {{}}, None
    def close(self):
        pass

class Backend:
    name, priority = "sick", 1
    def probe(self):
        {probe}
        return Probe((Device("real", "chip", "arch1", "cpu"),))
    def capabilities(self, device):
        return Capabilities(frozenset({{"op:to_slots"}}))
    def open(self, deployment):
        refuse_missing(deployment, self.capabilities(deployment.device), self.name)
        {open}
        return Session()

@hookimpl
def ml4core_backends():
    return [Backend()]
"""
BOOT = "from ml4core.cli import main; import sys; sys.exit(main(sys.argv[1:]))"


class Sick:
    """A folder with the plugin ``sick``, and the command line that judges it."""

    def __init__(self, folder: Path, **parts: str) -> None:
        self.folder = folder
        text = {"top": "", "probe": "pass", "open": "pass"} | parts
        self.limit = "8" if "sleep" in text["probe"] else "120"  # seconds of a probe
        (folder / "plug_sick.py").write_text(SOURCE.format(**text), "utf-8")
        info = folder / "dist_sick-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: dist-sick\nVersion: 1.0\nKeywords: ml4core-api:1-1\n"
        )
        (info / "entry_points.txt").write_text("[ml4core.backends]\nsick = plug_sick\n")

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = dict(os.environ, PYTHONPATH=str(self.folder), ML4_PROBE_TIMEOUT=self.limit)
        command = ["conformance", "run", "--backend", "sick", "--json", "r.json", *words]
        return subprocess.Popen(
            [sys.executable, "-c", BOOT, *command],
            cwd=self.folder,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def judged(self, *words: str) -> tuple[int, str, Result]:
        process = self.start(*words)
        out, _ = process.communicate(timeout=240)
        return process.returncode, out, load(self.folder / "r.json")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"top": "import not_installed_anywhere"}, "No module named 'not_installed_anywhere'"),
        ({"probe": "os.kill(os.getpid(), signal.SIGKILL)"}, "signal SIGKILL"),
        ({"probe": "time.sleep(900)"}, "no answer within 8 s"),
    ],
)
def test_without_a_probe_nothing_but_the_plugin_is_judged(
    tmp_path: Path, parts: dict[str, str], told: str
) -> None:
    code, out, result = Sick(tmp_path, **parts).judged("-k", "plugin.probe or to_slots/int32")
    assert code == 1, out
    ends = {each.id: each for each in result.results}
    assert str(ends["plugin.probe"].status) in ("FAIL", "ERROR")
    unmade = [each for each in result.results if each.profile == "ops"]
    assert unmade
    assert all(str(each.status) == "NOT-RUN" and told in each.reason for each in unmade)
    assert (result.device.kind, result.verdict) == ("none", "not conformant")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"open": "os.kill(os.getpid(), signal.SIGKILL)"}, "killed its process: signal SIGKILL"),
        ({"open": "raise ValueError('no luck')"}, "ValueError: no luck"),
        ({}, "op:to_slots"),  # declared, and its session has no ops
    ],
)
def test_a_backend_that_dies_or_lies_at_open(
    tmp_path: Path, parts: dict[str, str], told: str
) -> None:
    code, out, result = Sick(tmp_path, **parts).judged("-k", "to_slots/int32", "--jobs", "2")
    assert code == 1, out
    assert {str(each.status) for each in result.results} <= {"FAIL", "ERROR", "UNSUPPORTED"}
    broken = [each for each in result.results if str(each.status) != "UNSUPPORTED"]
    assert broken
    assert all(told in each.reason for each in broken)


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_a_valid_partial_result_and_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    mark = tmp_path / "worker.pid"
    hang = f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(900)"
    process = Sick(tmp_path, open=hang).start("-k", "to_slots/int32", "--jobs", "1")
    wait_for(lambda: mark.exists() and mark.read_text())
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    result = load(tmp_path / "r.json")
    assert not result.complete
    assert {str(each.status) for each in result.results} == {"NOT-RUN"}
    assert result.verdict == "incomplete"
    assert "interrupted" in out
    wait_for(lambda: not Path(f"/proc/{mark.read_text()}").exists())


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
