"""Known faults of a plugin, in its own ``conformance.toml``: run all the same, and held to fail.

::

    [waivers."ops.elements[sparse_mla/fp8_ds_mla]"]
    kind = "bug"                     # or "upstream", "hardware"
    raises = "CheckFailed"           # the type that the check ends with
    reason = "the last key of a page is read twice"
    link = "https://example.org/issues/12"
    expires = 2027-03-01
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from ml4core_conformance.check import Status
from ml4core_conformance.results import CheckResult

Kind = Literal["bug", "upstream", "hardware"]


@dataclass(frozen=True)
class Waiver:
    """One known fault.

    Attributes:
        check: id of the check.
        raises: type of the exception that it must end with: ``CheckFailed``, ``TimeoutError``,
            ``ProcessDied``, ``DeviceLost``, or the backend's own.
        expires: the last day on which it counts.
    """

    check: str
    kind: Kind
    raises: str
    reason: str
    link: str
    expires: date

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason} ({self.link}), until {self.expires}"


class WaiverError(ValueError):
    """A file of waivers that can't be read, with every fault in it."""


def load(path: Path) -> tuple[Waiver, ...]:
    """The waivers of a file. Raises ``WaiverError``."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WaiverError(f"{path}: {error}") from None
    problems = [f"unknown table {name!r}; works: waivers" for name in table if name != "waivers"]
    waivers = []
    entries = table.get("waivers", {})
    if not isinstance(entries, Mapping):
        raise WaiverError(f"{path}: waivers: works: a table for each check id")
    for check, entry in entries.items():
        faults = _faults(entry)
        problems += [f"{check}: {fault}" for fault in faults]
        if not faults:
            waivers.append(Waiver(check=check, **entry))
    if problems:
        raise WaiverError(f"{path}: " + "; ".join(problems))
    return tuple(waivers)


def applied(
    results: Sequence[CheckResult],
    waivers: Iterable[Waiver],
    *,
    known: Collection[str],
    today: date,
) -> tuple[tuple[CheckResult, ...], tuple[str, ...]]:
    """The results with what is waived as WAIVED, and every problem with a waiver: an id that is
    not ``known``, one that expired, one that was not needed, and one whose check failed otherwise.
    Each problem fails the run. A waiver of a check that the run left out is not judged.
    """
    by_id = {result.id: result for result in results}
    problems = []
    for waiver in waivers:
        result = by_id.get(waiver.check)
        problem = "" if waiver.check in known else "no check of the suite has this id"
        if waiver.expires < today:
            problem = f"expired on {waiver.expires}"
        elif result is not None and result.status is not Status.NOT_RUN:
            problem = _mismatch(waiver, result)
            if not problem:
                by_id[waiver.check] = replace(
                    result, status=Status.WAIVED, waiver=str(waiver), reason=result.reason
                )
        if problem:
            problems.append(f"waiver of {waiver.check}: {problem}")
    return tuple(by_id[result.id] for result in results), tuple(problems)


def _mismatch(waiver: Waiver, result: CheckResult) -> str:
    if result.status not in (Status.FAIL, Status.ERROR):
        return f"unexpected {result.status}; it has to go"
    if result.raised != waiver.raises:
        return f"the check ends with {result.raised}, and the waiver says {waiver.raises}"
    return ""


def _faults(entry: Any) -> list[str]:
    names = [field.name for field in fields(Waiver) if field.name != "check"]
    if not isinstance(entry, Mapping):
        return [f"works: a table with {', '.join(names)}"]
    found = [f"lacks {name}" for name in names if name not in entry]
    found += [f"unknown key {name!r}; works: {', '.join(names)}" for name in set(entry) - {*names}]
    if entry.get("kind", "bug") not in get_args(Kind):
        found.append(f"kind {entry['kind']!r}; works: {', '.join(get_args(Kind))}")
    if type(entry.get("expires", date.max)) is not date:
        found.append(f"expires {entry['expires']!r}; works: a date, as 2027-03-01")
    for name in ("raises", "reason", "link"):
        if not isinstance(entry.get(name, "x"), str) or not entry.get(name, "x").strip():
            found.append(f"{name} {entry[name]!r}; works: a text")
    return found
