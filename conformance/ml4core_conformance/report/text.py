"""A result for people, in lines."""

from __future__ import annotations

from collections.abc import Iterable

from ml4core_conformance.check import Status
from ml4core_conformance.results import CheckResult, Judged, Result

SHOWN = (Status.FAIL, Status.ERROR, Status.NOT_RUN, Status.WAIVED)
"""Statuses whose checks are listed one by one."""

_MOST_NOT_RUN = 12


def summary(result: Result) -> str:
    """What is not green with its reason, the counts, and the verdict."""
    lines = [*_listed(result), *(f"PROBLEM  {problem}" for problem in result.problems)]
    plugin, device = result.plugin, result.device
    version = f" {plugin.distribution} {plugin.version}" if plugin.distribution else ""
    kind = "" if device.kind == "real" else f" ({device.kind})"
    lines += [
        "",
        f"{plugin.backend}{version} on {device.name} {device.arch}{kind}: "
        f"{result.selection}, API {result.selection.api}",
        f"{counts(result.results)} in {result.seconds:.1f} s",
        f"{result.verdict.upper()} by suite {result.suite or 'without version'}"
        + ("" if result.selection.whole else ", as far as it was asked for")
        + ("" if result.complete else ", interrupted"),
    ]
    return "\n".join(lines).lstrip("\n") + "\n"


def counts(results: Iterable[CheckResult]) -> str:
    """``3 PASS, 1 FAIL``; with the share that gates nothing."""
    results = list(results)
    found = {status: sum(r.status is status for r in results) for status in Status}
    text = ", ".join(f"{count} {status}" for status, count in found.items() if count)
    provisional = sum(not result.gates for result in results)
    return (text or "no check") + (f" ({provisional} provisional)" if provisional else "")


def line(result: CheckResult) -> str:
    """One check on a line, its reason below."""
    note = " (provisional)" if not result.gates else ""
    waiver = f"\n    waived: {result.waiver}" if result.waiver else ""
    reason = "".join(f"\n    {line}" for line in result.reason.splitlines())
    return f"{result.status:<8} {result.id}{note}{reason}{waiver}"


def measured(judged: Judged) -> str:
    """``out elements: 1.2e-4 of 3.1e-4 (0.39) at …``."""
    return (
        f"{judged.what}: {judged.error:.3g} of {judged.bound:.3g} ({judged.ratio:.3g}) "
        f"at {judged.where}"
    )


def _listed(result: Result) -> list[str]:
    """Not-run checks that share a reason come as one line."""
    lines = []
    unmade: dict[str, list[str]] = {}
    for each in result.results:
        if each.status is Status.NOT_RUN:
            unmade.setdefault(each.reason, []).append(each.id)
        elif each.status in SHOWN:
            lines.append(line(each))
    for reason, ids in unmade.items():
        more = f" and {len(ids) - _MOST_NOT_RUN} more" if len(ids) > _MOST_NOT_RUN else ""
        lines.append(f"NOT-RUN  {', '.join(ids[:_MOST_NOT_RUN])}{more}\n    {reason}")
    return lines
