"""What the amdgpu driver says, read from sysfs: needs no torch and opens no device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ml4core.api import Refusal

_KFD = "dev/kfd"
_NODES = "sys/class/kfd/kfd/topology/nodes"
_DRIVER = (
    "the amdgpu driver of ROCm; a container needs `--device /dev/kfd --device /dev/dri` as well"
)


_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
_ID = "GPU-"
_LEAST_ID, _MOST_ID = 5, 20
"""Characters of an id that ROCr takes: its beginning may stand for it, if it is one GPU's alone."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use. ``index`` is torch's number of it; ``memory_bytes`` all of
    its own memory, used or not; ``cus`` its compute units as they are seen, fewer on a partition;
    0 if the driver doesn't say, as with ``unique_id``.
    """

    index: int
    arch: str
    memory_bytes: int
    cus: int = 0
    unique_id: int = 0

    def __str__(self) -> str:
        return f"AMD GPU ({self.arch}, {self.memory_bytes / 2**30:.1f} GiB)"


def find_gpus(
    root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> tuple[tuple[Gpu, ...], tuple[Refusal, ...]]:
    """The GPUs that the variables of ROCm leave, and what keeps this process from them. ``root``
    holds dev and sys.
    """
    kfd = root / _KFD
    listed = _gpus(root / _NODES)
    gpus, told = visible(listed, environment)
    faults = []
    if not kfd.exists():
        faults.append(Refusal("rocm", "driver", f"there is no {kfd}", _DRIVER))
    elif not os.access(kfd, os.R_OK | os.W_OK):
        reason = f"{kfd} may not be read and written by user {os.geteuid()}"
        faults.append(
            Refusal("rocm", "driver", reason, "membership in the groups render and video")
        )
    if not listed:
        faults.append(Refusal("rocm", "GPU", f"{root / _NODES} lists none", "an AMD GPU"))
    elif not gpus:
        reason = f"{root / _NODES} lists {len(listed)}, of which {', '.join(told)}"
        faults.append(Refusal("rocm", "GPU", reason, _works(told)))
    return gpus, tuple(faults)


def visible(
    gpus: Sequence[Gpu], environment: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """``gpus`` of the driver as torch numbers them, and what each variable that is set leaves, in
    words.

    ``ROCR_VISIBLE_DEVICES`` chooses first, by the driver's numbers or by ids. Among what it leaves
    ``HIP_VISIBLE_DEVICES`` chooses, or where that isn't set ``CUDA_VISIBLE_DEVICES``, which means
    the same to HIP. Each also orders. A list ends at its first word that names no GPU, so that an
    empty one and ``-1`` hide all. (HIP by itself reads an empty list as none; torch counts no GPU.)
    """
    left, told = list(gpus), []
    hip = _HIP if _HIP in environment else _CUDA
    for variable, chosen in ((_ROCR, _of_rocr), (hip, _of_hip)):
        if variable in environment:
            left = [left[i] for i in chosen(environment[variable], left)]
            told.append(f"{variable}={environment[variable]!r} leaves {len(left) or 'none'}")
    return tuple(replace(gpu, index=i) for i, gpu in enumerate(left)), tuple(told)


def _works(told: Sequence[str]) -> str:
    """What would leave a GPU: ``told`` of the first variable that leaves none."""
    at_fault = next(one for one in told if one.endswith(" none")).partition("=")[0]
    return f"{at_fault} unset, or numbers from 0 of GPUs that are there"


def _of_rocr(text: str, gpus: Sequence[Gpu]) -> list[int]:
    """A GPU that is named twice ends the list as well."""
    found: list[int] = []
    for word in text.split(","):
        word = word.strip()
        named = _by_id(word, gpus) if word[:1] in ("G", "g") else _number(word)
        if named is None or named >= len(gpus) or named in found:
            break
        found.append(named)
    return found


def _by_id(word: str, gpus: Sequence[Gpu]) -> int | None:
    if not _LEAST_ID <= len(word) <= _MOST_ID:
        return None
    found = [i for i, id in enumerate(_ids(gpus)) if id.upper().startswith(word.upper())]
    return found[0] if len(found) == 1 else None


def _of_hip(text: str, gpus: Sequence[Gpu]) -> list[int]:
    """Words as they stand, without blanks; of a GPU that is named twice the first counts."""
    found: list[int] = []
    for word in text.split(","):
        if _ID in word:
            named = next((i for i, id in enumerate(_ids(gpus)) if word in id), None)
        else:
            named = _number(word)
        if named is None or named >= len(gpus):
            break
        if named not in found:
            found.append(named)
    return found


def _ids(gpus: Sequence[Gpu]) -> list[str]:
    """As `rocminfo` prints them; empty where the driver doesn't say."""
    return [f"{_ID}{gpu.unique_id:016x}" if gpu.unique_id else "" for gpu in gpus]


def _number(word: str) -> int | None:
    plain = word.isascii() and word.isdigit() and word == str(int(word))
    return int(word) if plain else None


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
            cus = cus if "simd_per_cu" in facts else 0
            unique = facts.get("unique_id", 0)
            found.append(Gpu(len(found), arch(target), memory, cus, unique))
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
