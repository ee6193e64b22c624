"""Which TPU chips the machine has, read from sysfs and /dev.

No runtime is started: that would take the chips, and might wait for a metadata server that only
answers in Google's cloud.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ml4core.api import Refusal

_GOOGLE = "0x1ae0"
_GENERATIONS = {
    "0x0027": "tpu3",
    "0x005e": "tpu4",
    "0x0062": "tpu5p",
    "0x0063": "tpu5e",
    "0x006f": "tpu6e",
    "0x0076": "tpu7x",
}
"""PCI device id -> generation. Other devices of the same vendor are no TPUs."""


@dataclass(frozen=True)
class Chip:
    """A chip on the PCI bus; a tpu7x shows up as two devices in its runtimes."""

    index: int
    arch: str

    def __str__(self) -> str:
        return f"TPU chip ({self.arch})"


def find_chips(root: Path = Path("/")) -> tuple[tuple[Chip, ...], tuple[Refusal, ...]]:
    """The chips, and what keeps this process from them. ``root`` holds dev and sys."""
    generations = [
        _GENERATIONS[_read(folder / "device")]
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _read(folder / "vendor") == _GOOGLE and _read(folder / "device") in _GENERATIONS
    ]
    chips = tuple(Chip(index, generation) for index, generation in enumerate(generations))
    dev = root / "dev"
    nodes = sorted([*dev.glob("accel[0-9]*"), *dev.glob("accel/accel[0-9]*")])
    nodes += sorted(dev.glob("vfio/[0-9]*"))
    usable = [node for node in nodes if os.access(node, os.R_OK | os.W_OK)]
    faults = []
    if not chips:
        variables = sorted(name for name in os.environ if name.startswith("TPU_"))
        reason = (
            f"no TPU on the PCI bus; device nodes: {_names(nodes)}; "
            f"variables: {', '.join(variables) or 'no TPU_*'}"
        )
        faults.append(Refusal("tpu", "chip", reason, "a TPU host"))
    elif not usable:
        reason = f"this process may use no device node of {len(chips)} chips: {_names(nodes)}"
        remedy = "a privileged container, or one with the nodes /dev/accel* or /dev/vfio/*"
        faults.append(Refusal("tpu", "driver", reason, remedy))
    return chips, tuple(faults)


def _names(nodes: list[Path]) -> str:
    return ", ".join(str(node) for node in nodes) or "no /dev/accel*, no /dev/vfio/*"


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""
