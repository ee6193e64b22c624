"""Running counts while checks are made: a bar on a terminal; elsewhere a line for each failure, and
one a minute.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from ml4core.cli import output
from ml4core_conformance.check import Status
from ml4core_conformance.results import CheckResult

_COLOURS = {
    Status.PASS: "green",
    Status.FAIL: "red",
    Status.ERROR: "red",
    Status.UNSUPPORTED: "cyan",
    Status.WAIVED: "yellow",
    Status.NOT_RUN: "yellow",
}


EACH_S = 60.0
"""Seconds between lines of counts."""


class Progress:
    """Draws on stderr; ``take`` is a runner's observer."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._found: dict[str, Status] = {}
        self._bar: Any = None
        self._task: Any = None
        self._told = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[counts]}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=self._total, counts="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def take(self, result: CheckResult) -> None:
        self._found[result.id] = result.status
        if self._bar is not None:
            self._bar.update(self._task, completed=len(self._found), counts=self.counts())
            return
        if result.status in (Status.FAIL, Status.ERROR):
            first = result.reason.partition("\n")[0]
            output.note(f"{result.status} {result.id}: {first}")
        if (now := time.monotonic()) >= self._told + EACH_S:
            self._told = now
            counts = ", ".join(f"{count} {status}" for status, count in self._seen())
            output.note(f"{len(self._found)} of {self._total}: {counts}")

    def counts(self) -> str:
        """Each status that was seen and how often, coloured."""
        return " ".join(
            f"[{_COLOURS[status]}]{count} {status}[/]" for status, count in self._seen()
        )

    def _seen(self) -> list[tuple[Status, int]]:
        statuses = list(self._found.values())
        return [(status, statuses.count(status)) for status in Status if status in statuses]
