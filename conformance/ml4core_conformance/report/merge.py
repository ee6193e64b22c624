"""Many results as one table: a column for each device and suite version, a row for each check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ml4core_conformance.check import Check, Status
from ml4core_conformance.results import CheckResult, Result, Verdict, verdict


@dataclass(frozen=True)
class Cell:
    """The newest result of a check in a column, and the run that it comes from."""

    result: CheckResult
    run: Result


@dataclass(frozen=True)
class Column:
    """What is known of a backend on one device, by one version of the suite.

    Attributes:
        newest: the latest run; versions and verdicts of others may differ.
        cells: by check id; a check that isn't here was never run.
        verdict: over the rows of the table, so that what was never run is not green.
        age_days: of the oldest cell that counts.
        stale: older than the table allows.
    """

    newest: Result
    cells: Mapping[str, Cell]
    verdict: Verdict
    age_days: float
    stale: bool

    @property
    def name(self) -> str:
        return self.newest.column


@dataclass(frozen=True)
class Row:
    """A check of this suite, or one that only an older result knows (``known`` False)."""

    id: str
    family: str
    variant: str
    profile: str
    doc: str = ""
    bugs: tuple[str, ...] = ()
    provisional: bool = False
    known: bool = True


@dataclass(frozen=True)
class Matrix:
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]


def merge(
    results: Iterable[Result],
    checks: Sequence[Check],
    *,
    now: datetime | None = None,
    stale_days: float = 30,
) -> Matrix:
    """The table of all results. ``checks`` are those of this suite: each has a row, and one that
    a column lacks is NOT-RUN there.
    """
    now = now or datetime.now(UTC)
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in sorted(results, key=lambda each: each.created):
        groups.setdefault(_key(result), []).append(result)
    rows = {check.id: _row(check) for check in checks}
    for result in (result for group in groups.values() for result in group):
        for each in result.results:
            rows.setdefault(each.id, _old_row(each))
    columns = [_column(group, list(rows.values()), now, stale_days) for group in groups.values()]
    columns.sort(key=lambda column: (column.name, column.newest.suite))
    return Matrix(tuple(rows.values()), tuple(columns))


def age(created: str, now: datetime) -> float:
    """Days since a result was made; 0 for a time that can't be read or lies ahead."""
    try:
        made = datetime.fromisoformat(created.replace("Z", "+00:00"))
    except ValueError:
        return 0.0
    return max(0.0, (now - made).total_seconds() / 86400)


def _key(result: Result) -> tuple[str, ...]:
    device = result.device
    return (result.plugin.backend, device.name, device.arch, device.kind, result.suite)


def _column(
    runs: Sequence[Result], rows: Sequence[Row], now: datetime, stale_days: float
) -> Column:
    """``runs`` from the oldest to the newest."""
    cells: dict[str, Cell] = {}
    for run in runs:
        for result in run.results:
            empty = result.status is Status.NOT_RUN and not run.complete
            if result.id not in cells or not empty:
                cells[result.id] = Cell(result, run)
    gating = [row for row in rows if row.known and not row.provisional]
    found = [cells[row.id].result for row in rows if row.id in cells]
    missing = any(row.id not in cells for row in gating)
    oldest = max((age(cell.run.created, now) for cell in cells.values()), default=0.0)
    return Column(
        runs[-1],
        cells,
        verdict(found, runs[-1].problems, complete=not missing),
        oldest,
        oldest > stale_days,
    )


def _row(check: Check) -> Row:
    return Row(
        check.id,
        check.family,
        check.variant,
        check.profile,
        check.doc,
        check.bugs,
        check.provisional,
    )


def _old_row(result: CheckResult) -> Row:
    return Row(
        result.id,
        result.family,
        result.variant,
        result.profile,
        bugs=result.bugs,
        provisional=result.provisional,
        known=False,
    )
