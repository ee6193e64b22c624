"""Devices that a plan may name, in place of a size of memory: plain data in an asset."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ml4core.models.errors import shown


@dataclass(frozen=True)
class DeviceFacts:
    """Attributes:
    memory_gib: what the device's runtime reports, which is less than the product's name says.
    fp8: latent layout of ``--kv-cache-dtype fp8`` and ``auto`` there.
    """

    name: str
    memory_gib: float
    fp8: str


@cache
def known_devices() -> tuple[DeviceFacts, ...]:
    file = resources.files("ml4core") / "assets" / "devices.json"
    table = json.loads(file.read_text("utf-8"))
    return tuple(DeviceFacts(name, **facts) for name, facts in sorted(table.items()))


def find_device(name: str) -> DeviceFacts:
    """Raises ``ValueError`` that lists the known names."""
    for device in known_devices():
        if device.name == name.lower():
            return device
    known = ", ".join(device.name for device in known_devices())
    raise ValueError(f"{shown(name)} is not known; works: {known}, or --memory GIB")
