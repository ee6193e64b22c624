"""Tests that several processes run: the order of files, and turns of those that measure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.turns import LONG, in_order, turn

ROOT = Path(__file__).parents[1]
SOON_S = 0.2
"""What must not happen gets this long; what must happen gets minutes."""


@pytest.fixture
def enter(tmp_path: Path) -> Callable[[bool], tuple[threading.Event, threading.Event]]:
    """Begins a test in a thread: an event that it runs, and one that ends it."""
    files = tmp_path / "queue", tmp_path / "running"
    for file in files:
        file.touch()

    def begin(alone: bool) -> tuple[threading.Event, threading.Event]:
        runs, ends = threading.Event(), threading.Event()

        def work() -> None:
            with turn(alone, *files):
                runs.set()
                ends.wait(120)

        threading.Thread(target=work, daemon=True).start()
        return runs, ends

    return begin


def test_tests_run_beside_each_other(enter: Any) -> None:
    both = [enter(False), enter(False)]
    assert all(runs.wait(120) for runs, _ in both)
    for _, ends in both:
        ends.set()


def test_one_that_wants_to_be_alone_waits_and_is_waited_for(enter: Any) -> None:
    first, first_ends = enter(False)
    assert first.wait(120)
    timed, timed_ends = enter(True)
    assert not timed.wait(SOON_S)
    later, later_ends = enter(False)
    assert not later.wait(SOON_S), "it stands in the queue behind one that has not begun"
    first_ends.set()
    assert timed.wait(120)
    assert not later.wait(SOON_S)
    timed_ends.set()
    assert later.wait(120)
    later_ends.set()


def item(name: str, marker: str = "") -> Any:
    path = name.partition("::")[0]
    return SimpleNamespace(
        nodeid=name, path=path, get_closest_marker=lambda asked: asked == marker or None
    )


def test_long_files_come_first_and_measuring_ones_last() -> None:
    items = [
        item("tests/core/test_a.py::test_plain"),
        item("tests/core/test_a.py::test_timed", "alone"),
        item("tests/core/test_b.py::test_2"),
        item("tests/core/test_b.py::test_1"),
        item(f"{LONG[-1]}test_c.py::test"),
        item(f"{LONG[0]}::test"),
    ]
    first, *others = items
    in_order(items)
    assert items == [others[4], others[3], others[1], others[2], first, others[0]]


@pytest.mark.parametrize("name", LONG)
def test_long_files_are_there(name: str) -> None:
    assert (ROOT / name).exists()
