"""The suite judged: an honest backend passes, mutants die where they should, no check is idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import zip_longest

from ml4core_conformance.check import PROFILES, Check, Status
from ml4core_conformance.facts import Found
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.results import CheckResult
from ml4core_conformance.runner import run

_HONEST = (Status.PASS, Status.UNSUPPORTED)


@dataclass(frozen=True)
class Trial:
    """What became of one mutant.

    Attributes:
        results: of the checks that were made on it.
        killed_by: families of which a check said FAIL.
        survived: entries of ``dies_at`` of which none did.
        idle: entries of which the honest backend supports no check, so that nothing can show.
    """

    mutant: Mutant
    results: tuple[CheckResult, ...]
    killed_by: frozenset[str]
    survived: tuple[str, ...]
    seconds: float
    idle: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelfTest:
    """What the suite was found to be worth.

    Attributes:
        honest: results of the honest backend that are neither PASS nor UNSUPPORTED.
        vacuous: families that gate and killed no mutant, though one was there to be killed.
        unknown: mutants that name a check which the suite doesn't have.
    """

    judged: int
    honest: tuple[CheckResult, ...]
    trials: tuple[Trial, ...]
    vacuous: tuple[str, ...]
    unknown: tuple[str, ...]
    seconds: float
    complete: bool = True

    @property
    def passed(self) -> bool:
        return (
            self.complete
            and self.judged > 0
            and not (self.honest or self.vacuous or self.unknown)
            and not any(trial.survived for trial in self.trials)
        )


Tell = Callable[[str], None]


def selftest(
    found: Found,
    mutants: Iterable[Mutant],
    *,
    full: bool = False,
    jobs: int | None = None,
    partial: bool = False,
    tell: Tell = lambda line: None,
) -> SelfTest:
    """Judges the honest backend of ``found`` and its mutants, by the smallest cases.

    Args:
        full: every check on every mutant; else the checks that a mutant names, and of a family
            those up to the first that it dies at.
        partial: the mutants are not all that there are: only checks that they name are made on
            the honest backend, and none is called vacuous.
        tell: is given a line for each step.
    """
    start = time.monotonic()
    mutants = list(mutants)
    target = replace(found.target, small=True)
    checks = tuple(target.source())
    named = {entry for mutant in mutants for entry in mutant.dies_at}
    interrupted = False

    def judge(wrapped: Mutant | None, chosen: Sequence[Check], enough: Enough) -> list[CheckResult]:
        nonlocal interrupted
        if interrupted:
            return []
        subject = replace(target, wrap=wrapped.wrap) if wrapped else target
        outcome = run(subject, chosen, jobs=jobs, absent=found.absent, enough=enough)
        interrupted = not outcome.complete
        return list(outcome.results)

    fair = [check for check in checks if any(means(entry, check) for entry in named)]
    honest = judge(None, fair if partial else checks, lambda result: False)
    wrong = tuple(result for result in honest if result.status not in _HONEST and result.gates)
    tell(f"honest {target.name}: {len(honest)} checks, {len(wrong)} not green")
    trials = []
    for mutant in mutants:
        trials.append(_trial(mutant, checks, judge, full, honest))
        tell(told(trials[-1]))
    killing = {family for trial in trials for family in trial.killed_by}
    idle = {entry for trial in trials for entry in trial.idle}
    unshown = {check.family for check in checks if any(means(entry, check) for entry in idle)}
    gating = set() if partial else {check.family for check in checks if not check.provisional}
    return SelfTest(
        len(honest),
        wrong,
        tuple(trials),
        tuple(sorted(gating - killing - unshown)),
        tuple(sorted(name for name in named if not any(means(name, c) for c in checks))),
        time.monotonic() - start,
        not interrupted,
    )


Enough = Callable[[CheckResult], bool]
_Judge = Callable[[Mutant | None, Sequence[Check], Enough], list[CheckResult]]


def _trial(
    mutant: Mutant,
    checks: Sequence[Check],
    judge: _Judge,
    full: bool,
    honest: Sequence[CheckResult],
) -> Trial:
    start = time.monotonic()
    alive = set(mutant.dies_at)

    def all_dead(result: CheckResult) -> bool:
        if result.status is Status.FAIL:
            alive.difference_update([entry for entry in alive if means(entry, result)])
        return not alive and not full

    results = judge(mutant, checks if full else _named(mutant, checks), all_dead)
    failed = {result.family for result in results if result.status is Status.FAIL}
    idle = tuple(entry for entry in mutant.dies_at if entry in alive and _idle(entry, honest))
    survived = tuple(entry for entry in mutant.dies_at if entry in alive and entry not in idle)
    seconds = time.monotonic() - start
    return Trial(mutant, tuple(results), frozenset(failed), survived, seconds, idle)


def _idle(entry: str, honest: Sequence[CheckResult]) -> bool:
    """Whether the honest backend supports none of the checks that an entry means."""
    meant = [result.status for result in honest if means(entry, result)]
    return bool(meant) and all(status is Status.UNSUPPORTED for status in meant)


def _named(mutant: Mutant, checks: Sequence[Check]) -> list[Check]:
    """The checks that a mutant names: of each entry the first, then of each the second, and on."""
    rows = [[check for check in checks if means(entry, check)] for entry in mutant.dies_at]
    turns = [check for turn in zip_longest(*rows) for check in turn if check is not None]
    return list({check.id: check for check in turns}.values())


def means(entry: str, check: Check | CheckResult) -> bool:
    """Whether an entry of ``dies_at`` means a check: by its id, by ids with ``*`` for any text, or
    by its family.
    """
    return entry in (check.id, check.family) or fnmatchcase(check.id, entry.replace("[", "[[]"))


def within(
    mutants: Iterable[Mutant], checks: Sequence[Check], profiles: Collection[str]
) -> list[Mutant]:
    """Those that can die in these profiles alone. ``ValueError`` for a word that is none."""
    if unknown := sorted(set(profiles) - set(PROFILES)):
        raise ValueError(f"no profile {', '.join(unknown)}; works: {', '.join(PROFILES)}")
    return [
        mutant
        for mutant in mutants
        if all(
            check.profile in profiles
            for entry in mutant.dies_at
            for check in checks
            if means(entry, check)
        )
    ]


def told(trial: Trial) -> str:
    if trial.survived:
        return f"SURVIVED {trial.mutant.name}: not killed by {', '.join(trial.survived)}"
    if trial.idle:
        return f"idle     {trial.mutant.name}: unsupported here are {', '.join(trial.idle)}"
    by = ", ".join(trial.mutant.dies_at)
    return f"dead     {trial.mutant.name} ({trial.seconds:.1f} s): {by}"


def text(outcome: SelfTest) -> str:
    """The verdict on the suite, with all that is wrong with it."""
    lines = [
        f"HONEST   {result.status} {result.id}: {result.reason.partition(chr(10))[0]}"
        for result in outcome.honest
    ]
    for trial in outcome.trials:
        if trial.survived:
            lines.append(told(trial))
            lines.append(f"    {trial.mutant.doc}")
            ends = {
                f"{result.status} {result.id}: {result.reason.partition(chr(10))[0]}"
                for result in trial.results
                if result.status is not Status.PASS
            }
            lines += [f"    {end}" for end in sorted(ends)[:5]]
    lines += [
        f"VACUOUS  {family}: kills no mutant, so it proves nothing" for family in outcome.vacuous
    ]
    lines += [
        f"UNKNOWN  {entry}: a mutant names it, and no check is called so"
        for entry in outcome.unknown
    ]
    idle = sum(bool(trial.idle) for trial in outcome.trials)
    dead = sum(not (trial.survived or trial.idle) for trial in outcome.trials)
    lines.append(
        f"{outcome.judged} checks on the honest backend, {len(outcome.honest)} not green; "
        f"{dead} of {len(outcome.trials)} mutants dead{f', {idle} idle' if idle else ''}; "
        f"{len(outcome.vacuous)} vacuous families; {outcome.seconds:.0f} s"
    )
    lines.append("SOUND" if outcome.passed else "NOT SOUND" if outcome.complete else "INTERRUPTED")
    return "\n".join(lines) + "\n"
