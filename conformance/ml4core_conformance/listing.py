"""Checks as the command line names and shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ml4core.cli.exits import UsageError

if TYPE_CHECKING:
    from ml4core_conformance.check import Check
    from ml4core_conformance.results import Selection


def known_checks(backend: str) -> Sequence[Check]:
    """Every check of the suite; and those of a backend's plugin, if one is named."""
    from ml4core.registry import find
    from ml4core_conformance.catalog import all_checks
    from ml4core_conformance.own_checks import told_checks

    return (*all_checks(), *(told_checks(find(backend)) if backend else ()))


def none_matches(selection: Selection) -> str:
    profiles = f" of profile {', '.join(selection.profiles)}" if selection.profiles else ""
    return (
        f"-k {selection.expression!r}: no check{profiles} matches; `ml4 conformance list` shows all"
    )


def chosen_checks(selection: Selection, checks: Iterable[Check]) -> Sequence[Check]:
    from ml4core_conformance.catalog import choose

    try:
        return choose(
            checks,
            profiles=selection.profiles,
            expression=selection.expression,
            api=selection.api,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def facts(check: Check) -> dict[str, object]:
    return {
        "id": check.id,
        "family": check.family,
        "profile": check.profile,
        "requires": sorted(check.requires),
        "since": check.since,
        "provisional": check.provisional,
        "isolated": check.isolated,
        "timeout_s": check.timeout_s,
        "bugs": list(check.bugs),
        "doc": check.doc,
    }


def explained(check: Check) -> str:
    lines = [check.id, f"  {check.doc}", f"  profile: {check.profile}"]
    if check.requires:
        lines.append(f"  requires: {', '.join(sorted(check.requires))}; else to be refused")
    lines.append(f"  judges backends of API {check.since} and newer")
    if check.provisional:
        lines.append("  provisional: reported, and gates nothing yet")
    if check.isolated:
        lines.append("  runs in a process of its own")
    lines.append(f"  fails after {check.timeout_s:g} s")
    if check.bugs:
        lines.append(f"  guards against: {', '.join(check.bugs)}")
    return "\n".join(lines) + "\n"
