"""The architecture that a launch is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

import torch

_AHEAD: ContextVar[str] = ContextVar("ahead", default="gfx950")

_UNITS: Mapping[str, int] = MappingProxyType({"gfx950": 256, "gfx942": 304})
"""Compute units of a whole MI350X or MI300X, for launches that are compiled ahead."""


def arch_of(device: torch.device) -> str:
    """``gfx950`` or the like of an AMD GPU, ``sm_90`` of one that the sources are checked on;
    elsewhere what is compiled for, see ``ahead``.
    """
    if device.type != "cuda":
        return _AHEAD.get()
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def compute_units(device: torch.device) -> int:
    """Of the device; those of a whole GPU for tensors without data. A few on the host, where one
    program follows the other.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 4 if device.type == "cpu" else _UNITS[_AHEAD.get()]


def scales_in_products(device: torch.device) -> bool:
    """Whether the matrix units take MX scales beside their operands; else these are decoded."""
    return arch_of(device) == "gfx950"


def fp8_products(device: torch.device) -> bool:
    """Whether the matrix units take e4m3fn; gfx942's take e4m3fnuz only."""
    return arch_of(device) != "gfx942"


@contextmanager
def ahead(arch: str) -> Iterator[None]:
    """While it lasts, launches without a GPU are those of this architecture."""
    token = _AHEAD.set(arch)
    try:
        yield
    finally:
        _AHEAD.reset(token)
