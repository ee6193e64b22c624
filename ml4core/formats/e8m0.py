"""E8M0 (UE8M0): one byte of exponent, no sign, no fraction.

Byte b stands for 2**(b - 127): 0 is 2**-127 (a float32 denormal), 254 is 2**127. 255 is NaN. There
is no zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.formats.exponent import FRACTION_BITS, ceil_exponent, float_bits

BIAS = 127
MIN_EXPONENT = -127
MAX_EXPONENT = 127
NAN = 0xFF

_HALF_MIN_NORMAL = 0x400000  # 2**-127 as float32
_FLOAT_NAN = 0x7FC00000


def from_exponent(exponent: Tensor) -> Tensor:
    """Bytes uint8 [...] of 2**`exponent`, int32 [...], clamped to -127..127."""
    return (exponent.clamp(MIN_EXPONENT, MAX_EXPONENT) + BIAS).to(torch.uint8)


def encode(scale: Tensor) -> Tensor:
    """Bytes uint8 [...] of the float `scale` [...].

    Powers of two from 2**-127 to 2**127 are exact. Other values round up to the next power of two,
    so that what is divided by the decoded scale can't exceed its range. Zero and values below
    2**-127 give 0, values above 2**127 and +inf give 254, NaN and negative values give 255.
    """
    exponent = ceil_exponent(scale, 1.0)
    exponent = torch.where(float_bits(scale) <= _HALF_MIN_NORMAL, MIN_EXPONENT, exponent)
    return torch.where(scale >= 0, from_exponent(exponent), NAN)


def decode(code: Tensor) -> Tensor:
    """The float32 powers of two [...] of bytes uint8 [...]; 255 gives NaN."""
    bits = code.to(torch.int32) << FRACTION_BITS
    bits = torch.where(code == 0, _HALF_MIN_NORMAL, bits)
    return torch.where(code == NAN, _FLOAT_NAN, bits).view(torch.float32)


def pow2(exponent: Tensor) -> Tensor:
    """2**`exponent` as float32 [...], for int32 [...] clamped to -127..127; exact."""
    return decode(from_exponent(exponent))
