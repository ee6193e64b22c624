"""A command whose step never ends comes back, says why, and its exit code isn't 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ml4core.cli.exits import FAULT
from ml4core.models.seeded import make_seeded

STALLS = """
import sys, threading
from ml4core.cli import main
from ml4core.cpu.session import EagerExecutor
steps = []
def compile(self, step, shape):
    def run(*args):
        steps.append(shape)
        if len(steps) == 4:
            threading.Event().wait()
        return step(*args)
    return run
EagerExecutor.compile = compile
sys.exit(main(sys.argv[1:]))
"""
"""The command, on a backend whose fourth step never ends."""


@pytest.mark.multiprocess
def test_a_step_that_never_ends_ends_the_command(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "micro", "micro")
    done = subprocess.run(
        [
            *(sys.executable, "-c", STALLS, "generate", str(folder), "--backend", "cpu"),
            *("--prompt", "hello", "--raw", "--max-tokens", "8", "--ignore-eos", "--json"),
            *("--step-timeout-s", "2"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == FAULT, done.stderr
    assert done.stdout == "", "no token of it leaves"
    assert "fault 'timeout' at step 4" in done.stderr
    assert "did not end within 2 s" in done.stderr
    assert "<string>" in done.stderr, "says no place"
