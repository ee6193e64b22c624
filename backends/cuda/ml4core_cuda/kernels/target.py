"""The architectures of this backend, and the devices that sizes are measured on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from types import MappingProxyType

import torch
import triton

from ml4core_triton.kernels import target
from ml4core_triton.kernels.numeric import INTERPRETED
from ml4core_triton.kernels.target import Target, target_of

AHEAD_NAMES: Mapping[str, str] = MappingProxyType({"sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200"})
"""The devices whose measured sizes are compiled ahead."""

GLUON = ("3.6", "3.7")
"""Versions of triton whose Gluon kernels were compiled with; it is an experimental language."""

_UNITS = 132
"""Multiprocessors of an H200, for launches that are compiled ahead."""


def arch_of(device: torch.device) -> str:
    """``sm_90`` or the like, of a GPU; elsewhere what is compiled for, see ``ahead``."""
    return target_of(device).arch or "sm_90"


def device_name(device: torch.device) -> str:
    """The product's name, by which sizes are measured; "" on the host, where kernels are
    interpreted.
    """
    if device.type == "cuda":
        return _name(device.index or 0)
    return "" if device.type == "cpu" else AHEAD_NAMES.get(arch_of(device), "")


@cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@cache
def gluon() -> bool:
    """Whether this triton has what kernels in Gluon are written in; the interpreter has not."""
    version = tuple(triton.__version__.split(".")[:2])
    return not INTERPRETED.value and ".".join(version) in GLUON


def ahead(arch: str) -> AbstractContextManager[None]:
    """While it lasts, launches without a GPU are those of this architecture."""
    return target.ahead(Target(arch, _UNITS))


def most_registers(warps: int) -> int:
    """Registers a thread may have with one program a multiprocessor. Left to itself, the assembler
    may spill to make room for a second one.
    """
    return min(255, 65536 // (32 * warps))
