"""The architectures of this backend, and what their matrix units take."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

import torch

from ml4core_triton.kernels import target
from ml4core_triton.kernels.target import Target, target_of

_UNITS: Mapping[str, int] = MappingProxyType({"gfx950": 256, "gfx942": 304})
"""Compute units of a whole MI350X or MI300X, for launches that are compiled ahead."""


def arch_of(device: torch.device) -> str:
    """``gfx950`` or the like of an AMD GPU, ``sm_90`` of one that the sources are checked on;
    elsewhere what is compiled for, see ``ahead``.
    """
    return target_of(device).arch or "gfx950"


def scales_in_products(device: torch.device) -> bool:
    """Whether the matrix units take MX scales beside their operands; else these are decoded."""
    return arch_of(device) == "gfx950"


def fp8_products(device: torch.device) -> bool:
    """Whether the matrix units take e4m3fn; gfx942's take e4m3fnuz only."""
    return arch_of(device) != "gfx942"


def exact_fp8_products(device: torch.device) -> bool:
    """Whether they take e4m3fn and keep the fp32 bits of a sum, as gfx950's do: Hopper's, on which
    the sources are checked, keep about 14.
    """
    return arch_of(device) == "gfx950"


def ahead(arch: str) -> AbstractContextManager[None]:
    """While it lasts, launches without a GPU are those of this architecture."""
    return target.ahead(Target(arch, _UNITS[arch], lanes=64))
