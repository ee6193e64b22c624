"""Judges a backend and says all that was found: what every front end calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from datetime import date
from typing import Any

from ml4core.api import API_VERSION, Backend
from ml4core_conformance import facts
from ml4core_conformance.catalog import choose
from ml4core_conformance.check import Status
from ml4core_conformance.facts import Found
from ml4core_conformance.results import CheckResult, Result, Selection
from ml4core_conformance.runner import INTERRUPTED, Observer, Outcome, run
from ml4core_conformance.waivers import Waiver, applied

KEEP_S = 30.0
"""Seconds between results of a run that goes on."""


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
    keep: Callable[[Result], None] | None = None,
) -> Result:
    """A whole run, as the file says it; of the selection, ``only`` the checks of these ids.
    ``keep`` is given what was found so far, as an interrupted run's result, twice a minute: a run
    that is killed loses no more. Raises ``ValueError`` for a selection that can't be.
    """
    checks, waivers = found.checks, tuple(waivers)
    chosen = choose(
        checks,
        profiles=selection.profiles,
        expression=selection.expression,
        api=selection.api,
    )
    if only is not None:
        chosen = tuple(check for check in chosen if check.id in only)
    created = facts.created()
    libraries, git = facts.libraries(found.plugin), facts.checkouts(found.plugin)

    def made(outcome: Outcome) -> Result:
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
            libraries=libraries,
            git=git,
            capabilities=found.capabilities,
            options=dict(found.target.options),
            complete=outcome.complete,
            problems=problems,
            seconds=round(outcome.seconds, 3),
            jobs=outcome.jobs,
        )

    begun = time.monotonic()
    kept_at = begun
    so_far: dict[str, CheckResult] = {}

    def seen(result: CheckResult) -> None:
        nonlocal kept_at
        observe(result)
        so_far[result.id] = result
        if keep is not None and time.monotonic() - kept_at >= KEEP_S:
            left = (CheckResult.of(check, Status.NOT_RUN, INTERRUPTED) for check in chosen)
            results = tuple(so_far.get(check.id, check) for check in left)
            keep(made(Outcome(results, False, time.monotonic() - begun, jobs or 0)))
            kept_at = time.monotonic()

    return made(run(found.target, chosen, jobs=jobs, observe=seen, absent=found.absent))
