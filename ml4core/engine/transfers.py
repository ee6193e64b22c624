"""Small arrays between host and device, without a wait for what the device has still to do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_ALIGN = 16
"""Bytes to which each array of an upload is aligned, as views of other types need."""


@lru_cache(maxsize=16)
def has_streams(device: torch.device) -> bool:
    """Whether torch runs ordered work there with pinned copies and events."""
    if device.type == "cpu" or not torch.accelerator.is_available():
        return False
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type


def upload(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """The arrays on a device, all in one copy where that is queued. On a cpu they stay where they
    are, so the arrays must not be used for anything else.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    if not has_streams(device):
        return [torch.from_numpy(array).to(device) for array in arrays]
    starts = starts_of(arrays)
    staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    lay(arrays, starts, staged)
    return cut(staged.to(device, non_blocking=True), arrays, starts)


def starts_of(arrays: Sequence[NDArray[np.generic]]) -> list[int]:
    """The byte at which each array of an upload begins, and at which the last one ends."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGN) * _ALIGN)
    return starts


def lay(arrays: Sequence[NDArray[np.generic]], starts: Sequence[int], staged: Tensor) -> None:
    """Write the arrays' bytes, uint8 [bytes], each at its start. Arrays may have any strides."""
    host = staged.numpy()
    for array, start in zip(arrays, starts, strict=False):
        host[start : start + array.nbytes] = np.frombuffer(array.tobytes(), dtype=np.uint8)


def cut(sent: Tensor, arrays: Sequence[NDArray[np.generic]], starts: Sequence[int]) -> list[Tensor]:
    """Views of what ``lay`` wrote, in the arrays' shapes and dtypes."""
    return [
        sent[start : start + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def ints(values: ArrayLike, device: torch.device) -> Tensor:
    """int64 on a device."""
    return upload([np.array(values, dtype=np.int64)], device)[0]


def floats(values: ArrayLike, device: torch.device) -> Tensor:
    """fp32 on a device."""
    return upload([np.array(values, dtype=np.float32)], device)[0]


class HostCopy:
    """Tensors on their way to the host. What made them may be overwritten as soon as this is there:
    the copy is queued before whatever comes next.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.Event | None = None
        # On a cpu a copy, too: an executor may give the same memory again.
        self._tensors = [
            one.clone() if one.device.type == "cpu" else one.to("cpu", non_blocking=True)
            for one in tensors
        ]
        device = next((one.device for one in tensors if has_streams(one.device)), None)
        if device is not None:
            self._event = torch.Event(device)
            self._event.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors
