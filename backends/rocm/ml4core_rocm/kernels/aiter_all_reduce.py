"""AITER's all-reduce over peer memory: for what its window takes; the group's own for the rest.

``AITER_CUSTOM_AR_MAX_SIZE`` is read as the library reads it: absent 64 MiB, 0 turns it off, and
what isn't a number, is negative or beyond its pool counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from os import environ
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Refusal

WORLDS = (2, 4, 6, 8)
DEFAULT_BYTES = 64 << 20
POOL_BYTES = 1 << 30
MAX_SIZE, MIN_SIZE = "AITER_CUSTOM_AR_MAX_SIZE", "AITER_CUSTOM_AR_MIN_SIZE"
_UNIT = 16


def window(environment: Mapping[str, str] = environ) -> tuple[int, int]:
    """Sizes in bytes: above the first, up to the second; (0, 0) where it is off."""
    most = _number(environment.get(MAX_SIZE), DEFAULT_BYTES)
    if most > POOL_BYTES:
        most = DEFAULT_BYTES
    least = _number(environment.get(MIN_SIZE), 0)
    return (least, most) if most else (0, 0)


def refusals(world: int, hosts: int = 1) -> tuple[Refusal, ...]:
    """Why a group can't have it."""
    found = []
    if world not in WORLDS:
        worlds = ", ".join(map(str, WORLDS))
        reason = f"AITER's all-reduce is made for {worlds} ranks, not for {world}"
        found.append(Refusal("rocm", "all-reduce", reason, "the collectives of torch"))
    if hosts > 1:
        reason = f"AITER's all-reduce reaches peers of one host; the group spans {hosts}"
        found.append(Refusal("rocm", "all-reduce", reason, "the collectives of torch"))
    if not window()[1]:
        reason = f"{MAX_SIZE} is 0, which turns AITER's all-reduce off"
        found.append(Refusal("rocm", "all-reduce", reason, f"{MAX_SIZE} unset"))
    return tuple(found)


def takes(x: Tensor, window: tuple[int, int]) -> bool:
    """Whether a tensor is of a size and form that the kernel moves."""
    size = x.numel() * x.element_size()
    return x.is_contiguous() and size % _UNIT == 0 and window[0] < size <= window[1]


class AiterAllReduce:
    """The sum of a tensor over a group's ranks, fresh on each. Made on every rank at once.

    While the library warms a graph up it gives zeros and exchanges nothing, so that this is no
    barrier there.
    """

    def __init__(self, group: Any, device: torch.device, otherwise: Callable[[Tensor], Tensor]):
        module: Any = import_module("aiter.dist.device_communicators.custom_all_reduce")
        self._reduce = module.CustomAllreduce(group, device, max_size=POOL_BYTES)
        self._otherwise = otherwise
        self._window = window()

    def __call__(self, x: Tensor) -> Tensor:
        if takes(x, self._window):
            found: Tensor | None = self._reduce.custom_all_reduce(x)
            if found is not None:
                return found
        return self._otherwise(x)

    def close(self) -> None:
        self._reduce.close()


def _number(text: str | None, otherwise: int) -> int:
    try:
        found = otherwise if text is None else int(text)
    except ValueError:
        return otherwise
    return otherwise if found < 0 else found
