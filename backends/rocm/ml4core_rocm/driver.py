"""What the amdgpu driver says, read from sysfs: needs no torch and opens no device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ml4core.api import Refusal

_KFD = "dev/kfd"
_NODES = "sys/class/kfd/kfd/topology/nodes"
_DRIVER = (
    "the amdgpu driver of ROCm; a container needs `--device /dev/kfd --device /dev/dri` as well"
)


@dataclass(frozen=True)
class Gpu:
    """A GPU of the driver's topology. ``memory_bytes`` is all of its own memory, used or not;
    ``cus`` its compute units as they are seen, fewer on a partition; 0 if the driver doesn't say.
    """

    index: int
    arch: str
    memory_bytes: int
    cus: int = 0

    def __str__(self) -> str:
        return f"AMD GPU ({self.arch}, {self.memory_bytes / 2**30:.1f} GiB)"


def find_gpus(root: Path = Path("/")) -> tuple[tuple[Gpu, ...], tuple[Refusal, ...]]:
    """The GPUs, and what keeps this process from them. ``root`` holds dev and sys."""
    kfd = root / _KFD
    gpus = _gpus(root / _NODES)
    faults = []
    if not kfd.exists():
        faults.append(Refusal("rocm", "driver", f"there is no {kfd}", _DRIVER))
    elif not os.access(kfd, os.R_OK | os.W_OK):
        reason = f"{kfd} may not be read and written by user {os.geteuid()}"
        faults.append(
            Refusal("rocm", "driver", reason, "membership in the groups render and video")
        )
    if not gpus:
        faults.append(Refusal("rocm", "GPU", f"{root / _NODES} lists none", "an AMD GPU"))
    return gpus, tuple(faults)


def _gpus(nodes: Path) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    folders = (path for path in nodes.glob("*") if path.name.isdigit())
    for folder in sorted(folders, key=lambda path: int(path.name)):
        facts = _properties(folder / "properties")
        target = facts.get("gfx_target_version", 0)
        if target:  # 0: a CPU
            memory = sum(
                _properties(bank).get("size_in_bytes", 0)
                for bank in folder.glob("mem_banks/*/properties")
            )
            cus = facts.get("simd_count", 0) // max(1, facts.get("simd_per_cu", 0))
            found.append(
                Gpu(len(found), arch(target), memory, cus if "simd_per_cu" in facts else 0)
            )
    return tuple(found)


def arch(target: int) -> str:
    """The name of a ``gfx_target_version``: 90500 is gfx950, 90402 gfx942, 90010 gfx90a.

    Two decimal digits each of major, minor and stepping; the name writes the latter two in hex.
    """
    return f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"


def _properties(file: Path) -> dict[str, int]:
    """Lines of ``name value``; values that are no integers are left out."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError:  # nodes of GPUs that this process may not use can't be read
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
