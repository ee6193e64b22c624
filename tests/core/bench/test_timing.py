"""Medians, ranges, and ratios of things that are timed in turns."""

from __future__ import annotations

import time

import pytest

from ml4core.bench.timing import Span, in_turns, ratio, spread, timed


def test_a_spread_leaves_the_outer_tenths_out() -> None:
    found = spread([*range(1, 20), 1000])
    assert (found.median, found.low, found.high, found.repeats) == (10.5, 3, 18, 20)
    few = spread([3.0, 1.0, 2.0])
    assert (few.median, few.low, few.high) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_both_clocks_run() -> None:
    slept = timed(lambda: time.sleep(0.02))
    assert slept.wall >= 0.02
    assert slept.cpu < slept.wall / 2
    end = time.process_time() + 0.02

    def work() -> None:
        while time.process_time() < end:
            pass

    assert timed(work).cpu > 0.01


def test_turns_alternate_and_run_backwards_every_second_time() -> None:
    order: list[str] = []

    def call(name: str) -> Span:
        order.append(name)
        return Span(float(len(order)), 0.0)

    first, second = in_turns([lambda: call("a"), lambda: call("b")], 3)
    assert "".join(order) == "abbaab"
    assert [span.wall for span in first] == [1, 4, 5]
    assert [span.wall for span in second] == [2, 3, 6]


def test_a_ratio_is_of_the_same_turn() -> None:
    """A machine that gets slower in the middle changes no ratio."""
    over = [Span(2.0, 1.0), Span(20.0, 1.0), Span(4.0, 1.0)]
    under = [Span(1.0, 1.0), Span(10.0, 2.0), Span(2.0, 4.0)]
    assert ratio(over, under).median == 2.0
    assert ratio(over, under).high == 2.0
    assert ratio(over, under, "cpu").median == 0.5
    assert ratio(over, under, scale=4.0).median == 8.0
