"""Judges a backend and says all that was found: what every front end calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import date
from typing import Any

from ml4core.api import API_VERSION, Backend
from ml4core_conformance import facts
from ml4core_conformance.catalog import choose
from ml4core_conformance.facts import Found
from ml4core_conformance.results import CheckResult, Result, Selection
from ml4core_conformance.runner import Observer, run
from ml4core_conformance.waivers import Waiver, applied


def verify(
    backend: str | Backend,
    *,
    profiles: Collection[str] = (),
    expression: str = "",
    seeds: int = 1,
    jobs: int | None = None,
    device_kind: str = "real",
    waivers: Iterable[Waiver] = (),
) -> list[CheckResult]:
    """Every check's result for an installed backend, by name, or for a backend object.

    An object is pickled for the worker processes, so its class has to be importable, and a script
    needs ``if __name__ == "__main__":`` around the call; ``jobs=0`` runs all in this process.

    Args:
        profiles: of the checks; none named means all.
        expression: as ``-k``.
        seeds: inputs are drawn for the seeds 0 to this, exclusive.
        device_kind: ``real``, ``interpreted``, ``fake`` or ``source``.
        waivers: faults that are known; see ``ml4core_conformance.waivers``.

    Raises ``Refused`` if no such backend may be loaded, and ``ValueError`` for an unknown profile
    or a malformed expression.
    """
    found = find(backend, device_kind=device_kind, seeds=tuple(range(seeds)))
    chosen = Selection(tuple(profiles), expression, served_api(found), found.target.seeds)
    return list(examine(found, chosen, jobs=jobs, waivers=waivers).results)


def find(backend: str | Backend, **more: Any) -> Found:
    """What is to be judged, from a name or an object; ``more`` as in ``facts.find_plugin``."""
    if isinstance(backend, str):
        return facts.find_plugin(backend, **more)
    return facts.find_object(backend, **more)


def served_api(found: Found) -> int:
    """The newest API version that both core and the plugin know: newer checks don't judge it."""
    record = found.target.record
    return min(API_VERSION, record.api[1]) if record and record.api else API_VERSION


def examine(
    found: Found,
    selection: Selection,
    *,
    jobs: int | None = None,
    waivers: Iterable[Waiver] = (),
    observe: Observer = lambda result: None,
    only: Collection[str] | None = None,
) -> Result:
    """A whole run, as the file says it; of the selection, ``only`` the checks of these ids. Raises
    ``ValueError`` for a selection that can't be.
    """
    checks = found.checks
    chosen = choose(
        checks,
        profiles=selection.profiles,
        expression=selection.expression,
        api=selection.api,
    )
    if only is not None:
        chosen = tuple(check for check in chosen if check.id in only)
    created = facts.created()
    outcome = run(found.target, chosen, jobs=jobs, observe=observe, absent=found.absent)
    results, problems = applied(
        outcome.results, waivers, known={check.id for check in checks}, today=date.today()
    )
    return Result(
        created=created,
        suite=facts.version_of("ml4core-conformance"),
        core=facts.version_of("ml4core"),
        plugin=found.plugin,
        device=found.device,
        selection=selection,
        results=results,
        libraries=facts.libraries(found.plugin),
        git=facts.checkouts(found.plugin),
        capabilities=found.capabilities,
        options=dict(found.target.options),
        complete=outcome.complete,
        problems=problems,
        seconds=round(outcome.seconds, 3),
        jobs=outcome.jobs,
    )
