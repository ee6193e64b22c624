"""Worker processes: started, heard, ended with all that they started."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from ml4core_conformance.target import Target

PRELOAD = "ml4core_conformance.preload"
_FRAMES_BELOW = "(most recent call first):"
_MAX_CHARACTERS = 600


class Process:
    """One worker, and the pipe to it.

    Attributes:
        log: the file that has what it printed.
        dead: whether it ended, as far as ``received`` has seen.
        doubted: whether it tries the device before it judges.
    """

    def __init__(self, target: Target, log: Path, threads: int, *, doubted: bool = False) -> None:
        # Imported by name in the new process, so that this module needs no torch.
        from ml4core_conformance.worker import work

        context = _context()
        self.log = log
        self.doubted = doubted
        self.dead = False
        self._pipe, theirs = context.Pipe()
        self._process: Any = context.Process(  # type: ignore[attr-defined]
            target=work, args=(target, theirs, str(log), threads, doubted), daemon=False
        )
        self._process.start()
        theirs.close()

    @property
    def handles(self) -> tuple[Any, ...]:
        return (self._pipe, self._process.sentinel)

    def send(self, message: Any) -> None:
        with suppress(OSError):  # it died; ``received`` will see it
            self._pipe.send(message)

    def received(self) -> Iterator[Any]:
        """The messages that are there. Sets ``dead`` after the last one of a dead process."""
        ended = not self._process.is_alive()  # asked first: what it said before is in the pipe
        try:
            while self._pipe.poll():
                yield self._pipe.recv()
        except (EOFError, OSError):
            ended = True
        self.dead = ended

    def end(self) -> None:
        """Tells it and all that it started to end, and doesn't wait: a driver may take seconds."""
        pid = self._process.pid
        for end in (os.killpg, os.kill):  # it is no group of its own in its first moments
            with suppress(ProcessLookupError, PermissionError):
                end(pid, signal.SIGKILL)
                break

    def kill(self) -> int | None:
        """Ends it and all that it started; its exit code, None if it can't be ended."""
        self.end()
        self._process.join(timeout=10)
        self._pipe.close()
        code: int | None = self._process.exitcode
        return code


def died(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "it can't be ended"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def last_words(log: Path) -> str:
    """The end of what a process printed, or the innermost frames of its stack dump, in a line."""
    with suppress(OSError):
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        dumps = [i for i, line in enumerate(lines) if line.rstrip().endswith(_FRAMES_BELOW)]
        current = [i for i in dumps if lines[i].startswith("Current thread 0x")]
        if dumps:  # after a timeout the main thread comes last
            start = (current or dumps)[-1]
            lines = [*lines[max(dumps[0] - 2, 0) : dumps[0]], *lines[start + 1 : start + 5]]
        text = " | ".join(" ".join(line.split()) for line in lines[-6:])
        return text[-_MAX_CHARACTERS:]
    return ""


@cache
def _context() -> BaseContext:
    """Forks of a server that has imported torch and the suite once, and no plugin; new
    interpreters where the platform has no such server.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context
