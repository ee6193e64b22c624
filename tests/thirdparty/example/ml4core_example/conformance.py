"""What the conformance suite is told of this backend. It needs no import of the suite."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ml4core.api import Fault, Refused
from ml4core_example.layout import COLUMNS


def pages_of_eight(subject: Any) -> None:
    """A check of our own: it passes by returning, and fails by an ``AssertionError``."""
    deployment = subject.deployment(kv_layout=COLUMNS, block_size=12)
    try:
        subject.open(deployment)
    except Refused as refused:
        told = [reason.subject for reason in refused.refusals]
        assert told == ["--block-size"], f"it is refused for {told}"
        return
    raise AssertionError(f"pages of 12 tokens are served in {COLUMNS}")


class Harness:
    """How the suite makes this device fail."""

    def stall(self, session: Any) -> Callable[[], None]:
        """A device would start a kernel that waits for a flag, which the host sets at the end."""
        released = threading.Event()
        session.executor.before_step = released.wait
        return released.set

    def fail(self, session: Any) -> None:
        session.failed = Fault("device", "as the harness was asked to", 0)
