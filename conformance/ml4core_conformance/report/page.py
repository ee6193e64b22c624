"""The matrix as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ml4core.api import OPS
from ml4core_conformance.check import PROFILES, Check, Status
from ml4core_conformance.report.merge import Cell, Column, Matrix, Row, merge
from ml4core_conformance.results import Judged, Result

_FOLDER = Path(__file__).parent


def write_page(
    results: Iterable[Result],
    path: Path,
    *,
    checks: Sequence[Check] | None = None,
    stale_days: float = 30,
    now: datetime | None = None,
) -> None:
    """Writes the page of these results. ``checks`` are the rows that every column should have;
    None takes all of this suite.
    """
    from ml4core_conformance.catalog import all_checks

    now = now or datetime.now(UTC)
    rows = all_checks() if checks is None else checks
    matrix = merge(results, rows, now=now, stale_days=stale_days)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_page(matrix, stale_days=stale_days, now=now), "utf-8")


def to_page(matrix: Matrix, *, stale_days: float, now: datetime) -> str:
    data = {
        "generated": now.strftime("%Y-%m-%d %H:%M UTC"),
        "staleDays": stale_days,
        "statuses": [str(status) for status in Status],
        "profiles": list(PROFILES),
        "columns": [_column(column) for column in matrix.columns],
        "rows": [_row(row) for row in matrix.rows],
    }
    parts = {
        "/*STYLE*/": (_FOLDER / "page.css").read_text("utf-8"),
        "/*SCRIPT*/": (_FOLDER / "page.js").read_text("utf-8"),
        "/*DATA*/": _embedded(data),
    }
    page = (_FOLDER / "page.html").read_text("utf-8")
    for mark, text in parts.items():  # the data come last: what they hold is not looked at
        page = page.replace(mark, text, 1)
    return page


def _embedded(data: Any) -> str:
    """JSON that can't end the script element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _row(row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "family": row.family,
        "variant": row.variant,
        "op": head if (head := row.variant.partition("/")[0]) in OPS else row.family,
        "profile": row.profile,
        "doc": row.doc,
        "bugs": list(row.bugs),
        "provisional": row.provisional,
        "known": row.known,
    }


def _column(column: Column) -> dict[str, Any]:
    run = column.newest
    plugin, device = run.plugin, run.device
    facts = {
        "device": device.name,
        "architecture": device.arch,
        "kind": device.kind,
        "driver": device.driver,
        "plugin": f"{plugin.distribution} {plugin.version}".strip(),
        "suite": run.suite,
        "core": run.core,
        "API": str(run.selection.api),
        "asked for": str(run.selection),
        "seeds": str(len(run.selection.seeds)),
        "capabilities": run.capabilities.sha256[:12],
        "run": run.created,
        "took": f"{float(run.seconds):.0f} s",
    }
    facts |= {
        f"git {name}": state.commit[:12] + (" and changes" if state.dirty else "")
        for name, state in run.git.items()
    }
    facts |= {name: run.libraries[name] for name in ("python", "torch") if name in run.libraries}
    return {
        "name": column.name,
        "backend": plugin.backend,
        "device": device.name,
        "suite": run.suite,
        "verdict": column.verdict,
        "complete": run.complete,
        "created": run.created[:10],
        "ageDays": round(column.age_days, 1),
        "stale": column.stale,
        "problems": list(run.problems),
        "facts": {name: value for name, value in facts.items() if value},
        "cells": {id: _cell(cell, run) for id, cell in column.cells.items()},
    }


def _cell(cell: Cell, newest: Result) -> dict[str, Any]:
    result, run = cell.result, cell.run
    found: dict[str, Any] = {
        "status": str(result.status),
        "created": run.created,
        "seconds": float(result.seconds),
        "old": run is not newest,
    }
    if result.reason:
        found["reason"] = result.reason
    if result.waiver:
        found["waiver"] = result.waiver
    if result.measures:
        found["measures"] = [_judged(judged) for judged in result.measures]
    if (worst := result.worst) is not None:
        found["ratio"] = _number(worst.ratio)
    return found


def _judged(judged: Judged) -> dict[str, Any]:
    return {
        "what": judged.what,
        "error": _number(judged.error),
        "bound": _number(judged.bound),
        "ratio": _number(judged.ratio),
        "where": judged.where,
    }


def _number(value: float) -> float | str:
    """The script takes words for what JSON lacks, as ``Number`` of JavaScript reads them."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
