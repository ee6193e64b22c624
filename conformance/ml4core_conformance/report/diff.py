"""What changed between two results, with the ratio of errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ml4core_conformance.results import CheckResult, Judged, Result

NOTICED = 1.25
"""A ratio of errors, either way, below which a change is not told."""

_GREEN = ("PASS", "UNSUPPORTED", "WAIVED")


@dataclass(frozen=True)
class Change:
    """One check that differs.

    Attributes:
        before, after: None where it has no result.
        errors: by what was measured: the error before, after, and after / before.
    """

    id: str
    before: CheckResult | None
    after: CheckResult | None
    errors: tuple[tuple[str, float, float, float], ...] = ()

    @property
    def moved(self) -> bool:
        """Whether the verdict differs."""
        return _status(self.before) != _status(self.after)

    @property
    def worse(self) -> bool:
        """Whether it was green, and no longer is."""
        return _status(self.before) in _GREEN and _status(self.after) not in _GREEN


def diff(before: Result, after: Result, *, noticed: float = NOTICED) -> list[Change]:
    """Checks whose status differs, then those whose errors do, the greatest growth first."""
    old = {result.id: result for result in before.results}
    new = {result.id: result for result in after.results}
    found = []
    for id in dict.fromkeys([*old, *new]):
        a, b = old.get(id), new.get(id)
        errors = tuple(_errors(a, b, noticed)) if a and b else ()
        if _status(a) != _status(b) or errors:
            found.append(Change(id, a, b, errors))
    return sorted(found, key=lambda change: (not change.moved, -_growth(change)))


def text(before: Result, after: Result, changes: list[Change]) -> str:
    lines = [
        f"before  {_about(before)}",
        f"after   {_about(after)}",
        *_conditions(before, after),
        "",
    ]
    for change in changes:
        if change.moved:
            lines.append(f"{_status(change.before)} -> {_status(change.after)}  {change.id}")
            reason = change.after.reason if change.after else ""
            lines += [f"    {line}" for line in reason.splitlines()[:3]]
        else:
            lines.append(f"{_status(change.after)}  {change.id}")
        for what, old, new, ratio in change.errors:
            lines.append(f"    {what}: error {old:.3g} -> {new:.3g}, times {ratio:.3g}")
    moved = sum(change.moved for change in changes)
    lines.append(
        f"{moved} verdicts differ, {len(changes) - moved} more have other errors"
        if changes
        else "nothing differs"
    )
    return "\n".join(lines) + "\n"


def _errors(
    before: CheckResult, after: CheckResult, noticed: float
) -> Iterator[tuple[str, float, float, float]]:
    old = {judged.what: judged for judged in before.measures}
    for judged in after.measures:
        if judged.what in old:
            ratio = _ratio(old[judged.what], judged)
            if math.isnan(ratio) or not 1 / noticed <= ratio <= noticed:
                yield judged.what, old[judged.what].error, judged.error, ratio


def _ratio(before: Judged, after: Judged) -> float:
    """after / before; 1 if both are 0 or both are NaN."""
    a, b = before.error, after.error
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 1.0
    return b / a if a else math.inf


def _growth(change: Change) -> float:
    ratios = [math.inf if math.isnan(error[3]) else error[3] for error in change.errors]
    return max(ratios, default=0.0)


def _status(result: CheckResult | None) -> str:
    return str(result.status) if result else "absent"


def _about(result: Result) -> str:
    plugin = result.plugin
    version = f"{plugin.distribution} {plugin.version}".strip()
    return (
        f"{result.created}  {result.column}  {version}  suite {result.suite}  core {result.core}"
        f"  {result.verdict}"
    )


def _conditions(before: Result, after: Result) -> Iterator[str]:
    """What may explain a change: capabilities, libraries, seeds."""
    if before.capabilities.sha256 != after.capabilities.sha256:
        old, new = set(before.capabilities.features), set(after.capabilities.features)
        words = [*(f"+{word}" for word in sorted(new - old))]
        words += [f"-{word}" for word in sorted(old - new)]
        yield f"capabilities differ: {' '.join(words) or 'in defaults or limits'}"
    for name in sorted({*before.libraries, *after.libraries}):
        a, b = before.libraries.get(name, "none"), after.libraries.get(name, "none")
        if a != b:
            yield f"{name}: {a} -> {b}"
    if before.selection.seeds != after.selection.seeds:
        yield f"seeds: {len(before.selection.seeds)} -> {len(after.selection.seeds)}"
