"""The device that a launch is for, as far as its sizes depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True)
class Target:
    """What kernels are launched on.

    Attributes:
        arch: ``sm_90``, ``gfx950`` or the like; empty on the host, where kernels are interpreted.
        units: multiprocessors, or compute units.
        lanes: threads of a warp.
    """

    arch: str = ""
    units: int = 4  # few, as one program follows the other
    lanes: int = 32


HOST = Target()
_AHEAD: ContextVar[Target] = ContextVar("ahead", default=HOST)


def target_of(device: torch.device) -> Target:
    """Of a GPU, what it is; elsewhere what is compiled for, see ``ahead``."""
    if device.type == "cuda":
        return _found(torch.cuda.current_device() if device.index is None else device.index)
    wanted = _AHEAD.get()
    return replace(wanted, units=HOST.units) if device.type == "cpu" else wanted


@cache
def _found(index: int) -> Target:
    facts = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = str(facts.gcnArchName).partition(":")[0]
    else:
        arch = f"sm_{facts.major}{facts.minor}"
    return Target(arch, int(facts.multi_processor_count), int(facts.warp_size))


def units_of(device: torch.device) -> int:
    """Multiprocessors or compute units of a device."""
    return target_of(device).units


@contextmanager
def ahead(target: Target) -> Iterator[None]:
    """While it lasts, launches without a GPU are those of this target."""
    token = _AHEAD.set(target)
    try:
        yield
    finally:
        _AHEAD.reset(token)
