"""The architecture that a launch is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType

import torch

AHEAD_NAMES: Mapping[str, str] = MappingProxyType({"sm_90": "NVIDIA H200", "sm_100": "NVIDIA B200"})
"""The devices whose measured sizes are compiled ahead."""

_AHEAD: ContextVar[str] = ContextVar("ahead", default="sm_90")


def arch_of(device: torch.device) -> str:
    """``sm_90`` or the like, of a GPU; elsewhere what is compiled for, see ``ahead``."""
    if device.type != "cuda":
        return _AHEAD.get()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def device_name(device: torch.device) -> str:
    """The product's name, by which sizes are measured; "" on the host, where kernels are
    interpreted.
    """
    if device.type == "cuda":
        return _name(device.index or 0)
    return "" if device.type == "cpu" else AHEAD_NAMES.get(_AHEAD.get(), "")


@cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@contextmanager
def ahead(arch: str) -> Iterator[None]:
    """While it lasts, launches without a GPU are those of this architecture."""
    token = _AHEAD.set(arch)
    try:
        yield
    finally:
        _AHEAD.reset(token)
