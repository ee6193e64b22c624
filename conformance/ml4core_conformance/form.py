"""The form of an op's results: count, type, dtype, shape, strides, device and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ml4core.api import OPS, Weight
from ml4core_conformance.oracle.expected import Exact, Expected, Float, Law, Selected
from ml4core_conformance.placement import tensors


def problems_of_form(
    op: str, given: Mapping[str, Any], returned: Any, expected: Expected
) -> Iterator[str]:
    """What is wrong, in words, with what an op returned for the arguments ``given``."""
    spec = OPS[op]
    if not spec.returns:
        if returned is not None:
            yield f"it returned {_shown(returned)}; wanted is None, and {spec.writes} written"
        return
    values = (returned,) if len(spec.returns) == 1 else returned
    if not isinstance(values, tuple | list) or len(values) != len(spec.returns):
        names = ", ".join(one.name for one in spec.returns)
        yield f"it returned {_shown(returned)}; wanted are {len(spec.returns)} results: {names}"
        return
    device = next((value.device for _, value in tensors(given)), None)
    memory = {
        value.untyped_storage().data_ptr(): name for name, value in tensors(given) if value.numel()
    }
    for one, value in zip(spec.returns, values, strict=True):
        for name, wanted in _wanted(one.name, expected):
            found = value
            if isinstance(value, Weight) and "." in name:
                part = name.partition(".")[2]
                if part not in value.parts:
                    yield f"result {one.name!r} has no part {part!r}; it has {sorted(value.parts)}"
                    continue
                found = value.parts[part]
            yield from _misfit(name, found, wanted, device, memory)
            if isinstance(wanted, Law) and isinstance(found, Tensor):
                dtypes = [getattr(torch, dtype) for dtype in one.dtypes]
                if found.dtype not in dtypes or found.dim() != len(one.axes or ()):
                    yield f"result {name!r} is {_shown(found)}; wanted is {dtypes} {one.axes}"


def _wanted(name: str, expected: Expected) -> Iterator[tuple[str, Any]]:
    """What is expected of a result; of a ``Weight``'s parts, under ``weight.data`` and so on."""
    for key, wanted in expected.results.items():
        if key == name or key.startswith(f"{name}."):
            yield key, wanted


def _misfit(
    name: str,
    found: Any,
    wanted: Float | Exact | Selected | Law | None,
    device: torch.device | None,
    memory: Mapping[int, str],
) -> Iterator[str]:
    if wanted is None:
        if found is not None:
            yield f"result {name!r} is {_shown(found)}; wanted is None"
        return
    if not isinstance(found, Tensor):
        yield f"result {name!r} is {_shown(found)}; wanted is a tensor"
        return
    if not isinstance(wanted, Law):
        dtype = getattr(torch, wanted.dtype) if isinstance(wanted, Float) else wanted.value.dtype
        if found.dtype != dtype or found.shape != wanted.value.shape:
            axes = f" {list(wanted.axes)}" if len(wanted.axes) == wanted.value.dim() else ""
            yield (
                f"result {name!r} is {_shown(found)}; wanted is "
                f"{dtype} {list(wanted.value.shape)}{axes}"
            )
    if device is not None and found.device != device:
        yield f"result {name!r} is on {found.device}; wanted is {device}"
    if not found.is_contiguous():
        yield f"result {name!r} has strides {found.stride()} for {list(found.shape)}; not dense"
    shared = memory.get(found.untyped_storage().data_ptr()) if found.numel() else None
    if shared is not None:
        yield f"result {name!r} lies in the memory of argument {shared!r}; results are fresh"


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
