"""E2M1, the 4-bit element of MXFP4 and NVFP4.

Bit 3 is the sign, bits 2..0 count 0, 0.5, 1, 1.5, 2, 3, 4, 6. There is no NaN and no infinity.
Two codes share a byte: the low nibble is the even element, the high nibble the odd one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.formats import e4m3
from ml4core.formats.blocks import check_multiple

MAX = 6.0


def encode(x: Tensor) -> Tensor:
    """Codes uint8 0..15 [...] of `x` [...], rounded to nearest, ties to the even code.

    Beyond 6 (infinities too) saturates. The sign of zero is kept. NaN gives +6, as the hardware
    conversions do.
    """
    magnitude = x.to(torch.float32).abs()
    # 7 less one for each step not reached, so that NaN, which passes no comparison, ends at 7.
    code = 7 - (magnitude <= 0.25).to(torch.uint8)
    code = code - (magnitude < 0.75).to(torch.uint8)
    code = code - (magnitude <= 1.25).to(torch.uint8)
    code = code - (magnitude < 1.75).to(torch.uint8)
    code = code - (magnitude <= 2.5).to(torch.uint8)
    code = code - (magnitude < 3.5).to(torch.uint8)
    code = code - (magnitude <= 5.0).to(torch.uint8)
    negative = torch.signbit(x) & ~torch.isnan(x)
    return code | (negative.to(torch.uint8) << 3)


def decode(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [...] in `dtype` of codes uint8 0..15 [...]."""
    magnitude = code & 7
    # Each E2M1 value is an e4m3fn value. From 1.0 on, both step through exponent and fraction
    # alike.
    byte = torch.where(magnitude < 2, magnitude * 0x30, (magnitude << 2) + 0x30)
    return e4m3.decode(byte | ((code & 8) << 4), "e4m3fn", dtype)


def pack(code: Tensor) -> Tensor:
    """Bytes uint8 [..., K/2] of codes uint8 0..15 [..., K]; ValueError if K is odd."""
    check_multiple(code.shape[-1], 2, "the number of codes in a row")
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Codes uint8 0..15 [..., K] of bytes uint8 [..., K/2]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
