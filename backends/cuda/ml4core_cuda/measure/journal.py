"""What was done, a line each, written as it happens: a run that dies leaves it, and the next one
goes on behind it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STICKY = 70
"""Exit code of a process whose device context is broken: a fresh one has to go on."""

Facts = dict[str, Any]


class OutOfTime(Exception):
    """The budget is used up."""


class Journal:
    """Steps by key, in one file.

    Attributes:
        until: time of the clock after which no step begins.
    """

    def __init__(self, path: Path, until: float = float("inf")) -> None:
        self.until = until
        self._path = path
        self._done: dict[str, Facts] = {}
        self._open: set[str] = set()
        for line in read(path):
            self._open.discard(line["key"])
            if line["what"] == "begin":
                self._open.add(line["key"])
            else:
                self._done[line["key"]] = line
        for key in sorted(self._open):
            self._end(key, {"failed": "the process died in it"})

    def do(self, key: str, work: Callable[[], Facts]) -> Facts:
        """The facts of a step: found before, or worked out now. What goes wrong is a fact,
        ``failed``; after an error that breaks the context the process ends with ``STICKY``.
        """
        if key in self._done:
            return self._done[key]
        if time.time() > self.until:
            raise OutOfTime
        self._write({"what": "begin", "key": key})
        started = time.perf_counter()
        try:
            facts = work()
        except Exception as error:  # of a kernel, of a compiler, of a library: all are findings
            facts = {"failed": f"{type(error).__name__}: {error}"[:800]}
            if broken(error):
                self._end(key, facts)
                os._exit(STICKY)
        facts["seconds"] = round(time.perf_counter() - started, 3)
        return self._end(key, facts)

    def _end(self, key: str, facts: Facts) -> Facts:
        self._done[key] = {"what": "end", "key": key, **facts}
        self._write(self._done[key])
        return self._done[key]

    def _write(self, line: Facts) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def broken(error: BaseException) -> bool:
    """Whether an error leaves no use of this process' device context."""
    text = f"{type(error).__name__}: {error}"
    return "AcceleratorError" in text or ("CUDA error" in text and "out of memory" not in text)


def read(path: Path) -> Iterator[Facts]:
    """The lines; the last is left out if it was cut off."""
    if not path.is_file():
        return
    for line in path.read_text("utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
