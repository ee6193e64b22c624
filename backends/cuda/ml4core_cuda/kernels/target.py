"""The architecture that a launch is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_AHEAD: ContextVar[str] = ContextVar("ahead", default="sm_90")


def arch_of(device: torch.device) -> str:
    """``sm_90`` or the like, of a GPU; elsewhere what is compiled for, see ``ahead``."""
    if device.type != "cuda":
        return _AHEAD.get()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@contextmanager
def ahead(arch: str) -> Iterator[None]:
    """While it lasts, launches without a GPU are those of this architecture."""
    token = _AHEAD.set(arch)
    try:
        yield
    finally:
        _AHEAD.reset(token)
