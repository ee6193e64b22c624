"""Tensors on their way to other ranks: those of a host as bytes beside the call, those of a device
as one buffer that is broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN = 16
"""Bytes to which each tensor is aligned, as views of other types and kernels need."""


class Packed(NamedTuple):
    """Tensors without their values, or with them.

    Attributes:
        forms: dtype and shape of each.
        data: their bytes, as ``pack`` lays them; None if they come over the group.
    """

    forms: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    data: bytes | None

    @property
    def nbytes(self) -> int:
        return sum(_padded(_nbytes(*form)) for form in self.forms)


def pack(tensors: Sequence[Tensor]) -> tuple[Packed, Tensor | None]:
    """Tensors of one device; and what is to be broadcast, uint8 [bytes], None for those of a cpu,
    whose bytes go along.
    """
    forms = tuple((one.dtype, tuple(one.shape)) for one in tensors)
    device = tensors[0].device if tensors else "cpu"
    gap = torch.zeros(_ALIGN, dtype=torch.uint8, device=device)
    pieces = [gap[:0]]
    for one in tensors:
        data = one.contiguous().reshape(-1).view(torch.uint8)
        pieces += [data, gap[: _padded(len(data)) - len(data)]]
    buffer = torch.cat(pieces)
    if buffer.device.type == "cpu":
        return Packed(forms, buffer.numpy().tobytes()), None
    return Packed(forms, None), buffer


def unpack(
    packed: Packed, device: torch.device, receive: Callable[[Tensor], object]
) -> list[Tensor]:
    """The tensors on a device. ``receive`` fills a buffer with what was broadcast."""
    if packed.data is None:
        buffer = torch.empty(packed.nbytes, dtype=torch.uint8, device=device)
        receive(buffer)
    else:
        buffer = torch.frombuffer(bytearray(packed.data or b"\0"), dtype=torch.uint8).to(device)
    found, start = [], 0
    for dtype, shape in packed.forms:
        size = _nbytes(dtype, shape)
        found.append(buffer[start : start + size].view(dtype).view(shape))
        start += _padded(size)
    return found


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
