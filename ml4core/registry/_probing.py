"""The parent's side of a probe: children that may crash, hang or be noisy, and harm no one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ml4core.api import Capabilities, Device, Refusal, Refused
from ml4core.registry._discovery import find
from ml4core.registry._records import FoundDevice, PluginRecord, ProbeResult
from ml4core.registry._text import describe, last_words

TIMEOUT_VARIABLE = "ML4_PROBE_TIMEOUT"
DEFAULT_TIMEOUT = 30.0
"""Seconds."""

# The parent's path comes first: it decides which `ml4core` and which plugins the child sees.
_BOOT = (
    "import json, sys; job = json.loads(sys.argv[1]); sys.path[:] = job['path']; "
    "from ml4core.registry._child import main; main(job)"
)
_GRACE = 1.0  # seconds in which a child dumps its stack, once its time is up
_POLL = 0.01  # seconds


def probe(plugin: str | PluginRecord, timeout: float | None = None) -> ProbeResult:
    """Load and ask one plugin in a child process; the caller imports nothing of it.

    Args:
        plugin: the backend's name, or its record.
        timeout: seconds; None takes ``ML4_PROBE_TIMEOUT`` from the environment, or else 30.

    Raises:
        Refused: the name is unknown, the plugin's metadata refuses it, or the limit is no number of
            seconds. What goes wrong later, a crash or a hang too, is in the result.
    """
    record = find(plugin) if isinstance(plugin, str) else find(plugin.name, [plugin])
    return probe_all([record], timeout)[0]


def probe_all(
    records: Sequence[PluginRecord], timeout: float | None = None
) -> tuple[ProbeResult, ...]:
    """``probe`` of each record, at the same time."""
    limit = _limit(timeout)
    with ExitStack() as stack:
        children = []
        for record in records:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="ml4-probe-")))
            child = _Child(record, limit, folder)
            stack.callback(child.stop)
            children.append(child)
        while not all([child.done() for child in children]):  # a list: each is asked every time
            time.sleep(_POLL)
        return tuple(child.result() for child in children)


def _limit(timeout: float | None) -> float:
    if timeout is not None:
        subject, value = "timeout", str(timeout)
    else:
        subject, value = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf):
        reason = f"{value!r} is no number of seconds above 0"
        raise Refused([Refusal("core", subject, reason, f"{DEFAULT_TIMEOUT:g}")], "a probe")
    return seconds


class _Child:
    """One probe. Its answer comes through a file, so nothing that a plugin prints can spoil it."""

    def __init__(self, record: PluginRecord, limit: float, folder: Path) -> None:
        self.record = record
        self.limit = limit
        self.deadline = time.monotonic() + limit
        self.answer = folder / "answer.json"
        self.output = folder / "output.txt"
        self.ended = False
        self.late = False
        self.process: subprocess.Popen[bytes] | None = None
        self.start_error = ""
        job = {
            "path": sys.path,
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "target": record.target,
            "deadline": self.deadline,
            "answer": str(self.answer),
        }
        command = [sys.executable, "-P", "-c", _BOOT, json.dumps(job)]
        try:
            with self.output.open("wb") as output:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # a group of its own, so that all of it can be ended
                )
        except OSError as error:
            self.start_error = describe(error)

    def done(self) -> bool:
        """Whether it ended or its time is up; reaps nothing."""
        if self.process is None or self.ended:
            return True
        now = time.monotonic()
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        exited = os.waitid(os.P_PID, self.process.pid, options) is not None
        self.late = now >= self.deadline + (0 if exited else _GRACE)
        self.ended = exited or self.late
        return self.ended

    def result(self) -> ProbeResult:
        """Its answer, or what became of it. To be called once it is done."""
        code = self.stop()
        if self.start_error:
            return self._broken(f"its probe can't be started: {self.start_error}")
        try:
            return _parse(json.loads(self.answer.read_text("utf-8")))
        except (OSError, ValueError):
            words = last_words(self.output.read_text("utf-8", errors="replace"))
        end = f"; last output: {words}" if words else ""
        if not self.late:
            return self._broken(f"its probe died before it answered: {_death(code)}{end}")
        return self._broken(
            f"its probe gave no answer within {self.limit:g} s and was ended{end}",
            remedy=f"a larger {TIMEOUT_VARIABLE}, if the machine is only slow",
        )

    def _broken(self, reason: str, remedy: str = "") -> ProbeResult:
        refusal = Refusal(self.record.name, "probe", reason, remedy)
        return ProbeResult("broken", refusals=(refusal,))

    def stop(self) -> int | None:
        """End it and all that it started; its exit code, None if even that can't end it."""
        if self.process is None:
            return None
        if self.process.returncode is None:
            # Not reaped yet, so the group's id can't have passed on to another.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
        return self.process.returncode


def _death(code: int | None) -> str:
    if code is None:
        return "it can't be ended"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _parse(answer: Mapping[str, Any]) -> ProbeResult:
    return ProbeResult(
        state=answer["state"],
        devices=tuple(_device(found) for found in answer["devices"]),
        refusals=tuple(Refusal(**refusal) for refusal in answer["refusals"]),
        priority=answer["priority"],
    )


def _device(answer: Mapping[str, Any]) -> FoundDevice:
    values = dict(answer)
    capabilities = values.pop("capabilities")
    return FoundDevice(
        Device(**values),
        Capabilities(
            frozenset(capabilities["features"]), capabilities["defaults"], capabilities["limits"]
        ),
    )
