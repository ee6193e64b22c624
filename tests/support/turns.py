"""Several processes run tests: which come first, and which run with no other beside them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LONG = (
    "tests/tpu/test_torch_xla.py",  # waits for a download of 1.3 GB
    "tests/selftest/test_mutants.py",
    "tests/selftest/test_cpu_conforms.py",
    "tests/thirdparty/test_example.py",
    "tests/tpu/",
    "tests/rocm/kernels/",
    "tests/device/",
)
"""Files, and folders of files, of which one alone takes a process minutes: begun last, it would
leave the others idle.
"""


def in_order(items: list[pytest.Item]) -> None:
    """Long files first, those with a test of its own turn last; in a file nothing changes place."""
    timed = {item.path for item in items if item.get_closest_marker("alone")}

    def place(item: pytest.Item) -> int:
        if item.path in timed:
            return len(LONG) + 1
        return next((i for i, one in enumerate(LONG) if item.nodeid.startswith(one)), len(LONG))

    items.sort(key=place)


@contextmanager
def turn(alone: bool, queue: Path, running: Path) -> Iterator[None]:
    """Waits until a test may run: any number at once, or one ``alone``.

    Both files exist, are locked and never written. Whoever waits stands in the queue, so that a
    test that wants to be alone is not passed by others for ever.
    """
    with queue.open() as first, running.open() as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(first, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(second, fcntl.LOCK_UN)  # by name: a child may still hold the file open
