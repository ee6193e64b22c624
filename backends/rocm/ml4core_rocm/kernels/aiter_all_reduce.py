"""AITER's all-reduce over peer memory: for what its window takes; the group's own for the rest.

``AITER_CUSTOM_AR_MAX_SIZE`` is read as the library reads it: absent 64 MiB, 0 turns it off, and
what isn't a number, is negative or beyond its pool counts as absent. Of prompts it takes half of
its pool at most, as its sum in two stages uses twice a message. No decode is as large, so that the
bound holds for all here, and callers need not tell what a step is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import environ
from typing import Any

import torch
from torch import Tensor

from ml4core_rocm.aiter_functions import load

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
    return (least, min(most, POOL_BYTES // 2)) if most else (0, 0)


def takes(x: Tensor, window: tuple[int, int]) -> bool:
    """Whether a tensor is of a size and form that the kernel moves."""
    size = x.numel() * x.element_size()
    return size % _UNIT == 0 and window[0] < size <= window[1] and weakly_contiguous(x)


def weakly_contiguous(x: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of axes; those of another order than
    the axes' have to reach to the end of their storage, as the library looks at that.
    """
    if x.is_contiguous():
        return True
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    left = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    return x.permute(order).is_contiguous() and left == x.numel() * x.element_size()


class AiterAllReduce:
    """The sum of a tensor over a group's ranks, fresh on each. Made on every rank at once, over a
    group of the host (gloo), by which the library exchanges handles.

    While the library warms a graph up it gives zeros and exchanges nothing, so that this is no
    barrier there.
    """

    def __init__(self, group: Any, device: torch.device, otherwise: Callable[[Tensor], Tensor]):
        self._reduce = load("CustomAllreduce")(group, device, max_size=POOL_BYTES)
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
