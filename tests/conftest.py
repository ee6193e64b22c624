"""What every test shares: reproducible property tests, and skips where there is no device."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing_device = [item for item in items if item.get_closest_marker("accelerator")]
    if not needing_device:
        return
    import torch  # costs seconds, so only where a test asks

    if not torch.accelerator.is_available():
        skip = pytest.mark.skip(reason="needs an accelerator, and torch sees none")
        for item in needing_device:
            item.add_marker(skip)
