"""Repeated timings, and ratios of two things that are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Span:
    """Seconds of one repeat: of the clock on the wall, and of all cores of this process."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Spread:
    """A median and the range of all repeats but the outer tenths."""

    median: float
    low: float
    high: float
    repeats: int


def timed(call: Callable[[], object]) -> Span:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Span(time.perf_counter() - wall, time.process_time() - cpu)


def spread(values: Sequence[float]) -> Spread:
    """Raises ``ValueError`` if there are none."""
    if not values:
        raise ValueError("a spread of no values")
    ordered = sorted(values)
    cut = len(ordered) // 10
    return Spread(median(ordered), ordered[cut], ordered[-1 - cut], len(ordered))


def in_turns(calls: Sequence[Callable[[], Span]], repeats: int) -> list[list[Span]]:
    """Spans of each call, ``repeats`` of them. Every second round runs backwards, so that what
    grows or fades while they run favours none.
    """
    spans: list[list[Span]] = [[] for _ in calls]
    for turn in range(repeats):
        order = range(len(calls))
        for index in reversed(order) if turn % 2 else order:
            spans[index].append(calls[index]())
    return spans


def ratio(
    over: Sequence[Span], under: Sequence[Span], clock: str = "wall", scale: float = 1.0
) -> Spread:
    """Of the repeats of two calls, turn by turn, times ``scale``. ``clock`` is a field of
    ``Span``.
    """
    pairs = zip(over, under, strict=True)
    return spread([scale * getattr(a, clock) / getattr(b, clock) for a, b in pairs])
