"""Host-side check of block scales read from a file. Not traceable: it looks at the data."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# Bytes that are NaN in each scale format.
_NAN_BYTES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"e4m3fn": (0x7F, 0xFF), "e4m3fnuz": (0x80,), "e8m0": (0xFF,)}
)


def check_scales(scale: Tensor, fmt: str, name: str, first: tuple[int, int] = (0, 0)) -> None:
    """ValueError if a scale byte of tensor `name` is NaN; it names tensor, row and block.

    `scale` is [rows, blocks], with leading axes (experts) or without, as uint8 or a one-byte float
    dtype. `fmt` is "e4m3fn", "e4m3fnuz" or "e8m0". `first` are the row and block in `name` that a
    part of it begins with. Some writers leave such bytes where a whole
    block is zero; a block with one decodes to NaN.
    """
    if fmt not in _NAN_BYTES:
        raise ValueError(f"unknown scale format {fmt!r}; known: {', '.join(_NAN_BYTES)}")
    code = torch.atleast_2d(
        scale if scale.dtype == torch.uint8 else scale.contiguous().view(torch.uint8)
    )
    bad = torch.zeros_like(code, dtype=torch.bool)
    for byte in _NAN_BYTES[fmt]:
        bad |= code == byte
    if not bad.any():
        return
    *leading, row, block = bad.nonzero()[0].tolist()
    where = "".join(f"[{index}]" for index in leading)
    found = int(code[(*leading, row, block)])
    row, block = first[0] + row, first[1] + block
    raise ValueError(
        f"{name}{where}: the scale of row {row}, block {block} is the byte 0x{found:02X}, NaN in "
        f"{fmt} ({int(bad.sum())} of {code.numel()} scales are). Quantise the tensor again with a "
        "writer that gives empty blocks a finite scale"
    )
