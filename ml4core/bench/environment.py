"""Where and when figures were taken: without it they say nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ml4core import __version__
from ml4core.registry import Choice


def environment(choice: Choice, threads: int) -> dict[str, Any]:
    """JSON-able facts of this run: backend, device, versions, date, and what else the host does."""
    record, device = choice.plugin.record, choice.device
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": record.name,
        "device": device.name,
        "device_kind": device.kind,
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "threads": threads,
        "load": load_average(),
        "versions": versions({record.distribution: record.version}),
    }


def versions(more: Mapping[str, str]) -> dict[str, str]:
    own = {
        "ml4core": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return own | dict(more)


def processor() -> str:
    """The host's processor as its maker names it, where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def load_average() -> float | None:
    """Processes that ran or waited for a core in the last minute; None where nobody counts."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
