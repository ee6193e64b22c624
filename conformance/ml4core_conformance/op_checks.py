"""Checks of ops made from cases: one for each family, op and variant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import all_cases
from ml4core_conformance.cases.lint import problems
from ml4core_conformance.check import Check, NotRun, Profile
from ml4core_conformance.evaluation import Evaluation
from ml4core_conformance.subject import Subject

Judge = Callable[[Subject, Evaluation], bool]
"""Judges one case; says whether there was anything to judge."""


def variants(ops: Iterable[str] | None = None) -> Iterator[tuple[str, str, tuple[OpCase, ...]]]:
    """Each op and variant that has cases, of all ops or of these, with its cases."""
    wanted = None if ops is None else set(ops)
    groups: dict[tuple[str, str], list[OpCase]] = {}
    for case in all_cases():
        if wanted is None or case.op in wanted:
            groups.setdefault((case.op, case.variant), []).append(case)
    for (op, variant), cases in groups.items():
        yield op, variant, tuple(cases)


def op_check(
    family: str,
    cases: Sequence[OpCase],
    judge: Judge,
    doc: str,
    *,
    profile: Profile = "ops",
    requires: frozenset[str] = frozenset(),
) -> Check:
    """A check of one op and variant, to which all cases belong. ``requires`` is what it needs
    beyond the op and its cases' words.
    """
    first = cases[0]

    def run(subject: Subject) -> None:
        over(subject, cases, judge)

    return Check(
        family,
        profile,
        run,
        doc,
        variant=f"{first.op}/{first.variant}",
        requires=frozenset({f"op:{first.op}"}) | first.requires | requires,
        unit=f"{first.op}/{first.variant}",
        bugs=tuple(sorted({bug for case in cases for bug in case.bugs})),
    )


def over(subject: Subject, cases: Sequence[OpCase], judge: Judge) -> None:
    """Judges each case with each seed. ``NotRun`` if there was nothing to judge, or if the set of
    the op's cases lacks a corner of the contract.
    """
    if missing := problems(cases[0].op):
        raise NotRun(f"the suite's own cases are incomplete: {'; '.join(missing)}")
    small = [case for case in cases if case.small]
    judged = False
    limits = subject.capabilities.limits
    for case in small if subject.small and small else cases:
        if not case.within(limits):
            continue
        for seed in subject.seeds:
            judged |= judge(subject, subject.evaluate(case, seed))
    if not judged:
        raise NotRun(f"no case of {cases[0].op}/{cases[0].variant} has what this check judges")
