"""Power-of-two arithmetic on the bits of float32.

Scales of block formats are powers of two found by exact rules. `log2` and `exp2` round, and
devices differ on denormals and on division by a constant; integers do neither.

float32, most significant bit first: 1 sign, 8 exponent (bias 127), 23 fraction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FRACTION_BITS = 23
BIAS = 127
FRACTION_MASK = 0x7FFFFF
MIN_NORMAL = 0x800000
INFINITY = 0x7F800000


def float_bits(x: Tensor) -> Tensor:
    """The int32 bits of `x` [...] as float32."""
    return x.to(torch.float32).contiguous().view(torch.int32)


def carried_exponent(x: Tensor, carry: int) -> Tensor:
    """The int32 exponent of `x` [...] after adding `carry` (0..0x7FFFFF) to its fraction bits.

    The carry decides where rounding up begins: 0 is floor(log2 x), 0x7FFFFF is ceil(log2 x).
    `x` is not negative. Zero and denormals give -127 or -126, infinity and NaN give 128.
    """
    return ((float_bits(x).clamp(0, INFINITY) + carry) >> FRACTION_BITS) - BIAS


def ceil_exponent(x: Tensor, limit: float) -> Tensor:
    """The least int32 e [...] with `x <= limit * 2**e`: ceil(log2(x / limit)) without rounding.

    `x` [...] is finite and not negative, `limit` a positive float32 normal. For a zero or denormal
    `x` the inequality holds, but e need not be the least; callers clamp e from below.
    """
    fraction, exponent = math.frexp(limit)  # limit = fraction * 2**exponent, 0.5 <= fraction < 1
    scaled = (2 * fraction - 1) * (1 << FRACTION_BITS)
    if scaled != int(scaled):
        raise ValueError(
            f"limit {limit!r} is not a float32; give one with at most 24 significant bits"
        )
    return carried_exponent(x, FRACTION_MASK - int(scaled)) - (exponent - 1)


def ceil_pow2(x: Tensor) -> Tensor:
    """The least power of two >= `x` [...], as float32; exact, denormals included.

    0 gives 0. Above 2**127 and for +inf the result is inf. Negative values and NaN give NaN.
    """
    bits = float_bits(x).clamp(0, INFINITY)
    normal = (bits + FRACTION_MASK) & ~FRACTION_MASK
    # A denormal is an integer multiple of 2**-149: round that integer up by filling all bits below
    # its top one.
    below = bits - 1
    for shift in (1, 2, 4, 8, 16):
        below = below | (below >> shift)
    rounded = torch.where(bits < MIN_NORMAL, below + 1, normal).view(torch.float32)
    return torch.where(x >= 0, rounded, math.nan)
