"""Holds the cases of an op against its contract, before any backend runs."""

from __future__ import annotations

from collections import Counter
from functools import cache

from ml4core.api import OPS
from ml4core.api.capabilities import check_words
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import all_cases


@cache
def problems(op: str) -> tuple[str, ...]:
    """What is wrong with the suite's own cases of an op; empty if nothing is."""
    return lint(op, tuple(case for case in all_cases() if case.op == op))


def lint(op: str, cases: tuple[OpCase, ...]) -> tuple[str, ...]:
    """Corners of the contract that no case shows, corners that it doesn't know, ids that are taken,
    unknown words, and variants whose cases need different words.
    """
    found = []
    shown = {corner for case in cases for corner in case.corners}
    corners = set(OPS[op].corners)
    found += [f"{op}: no case shows the corner {corner!r}" for corner in sorted(corners - shown)]
    found += [f"{op}: the contract has no corner {corner!r}" for corner in sorted(shown - corners)]
    twice = [id for id, count in Counter(case.id for case in cases).items() if count > 1]
    found += [f"{id}: two cases have this id" for id in twice]
    needs: dict[str, frozenset[str]] = {}
    for case in cases:
        try:
            check_words(case.requires)
        except ValueError as error:
            found.append(f"{case.id}: {error}")
        first = needs.setdefault(case.variant, case.requires)
        if case.requires != first:
            found.append(f"{case.id}: needs {sorted(case.requires)}, others {sorted(first)}")
    return tuple(found)
