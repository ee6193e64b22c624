"""What every test shares: reproducible property tests, probes that are remembered, skips where
there is no device, and turns where several processes run tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.turns import in_order, turn

ROOT = Path(__file__).parents[1]
TEAM = "PYTEST_XDIST_WORKER" in os.environ
"""Whether this is one of several processes, as `make test` starts them."""

# Before torch is imported. Tensors are small: more threads would spin while they wait for each
# other, for three times the work on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a busy machine is not a failure. Derandomised: every run tries the same examples.
settings.register_profile("ml4core", deadline=None, derandomize=True)
settings.load_profile("ml4core")

# A job in the background may ignore these signals, and so would the processes that tests tell to
# stop by them.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # a test's time limit begins within
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not TEAM:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with turn(alone, ROOT / "constraints.txt", ROOT / "pyproject.toml"):
        return (yield)


@pytest.fixture(scope="module")
def probed_once() -> Iterator[None]:
    """In this process a backend is selected by what an earlier test's probe of it found."""
    from support import probes

    with probes.remembered():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if TEAM:
        in_order(items)
    needing_device = [item for item in items if item.get_closest_marker("accelerator")]
    if not needing_device:
        return
    import torch  # costs seconds, so only where a test asks

    if not torch.accelerator.is_available():
        skip = pytest.mark.skip(reason="needs an accelerator, and torch sees none")
        for item in needing_device:
            item.add_marker(skip)
