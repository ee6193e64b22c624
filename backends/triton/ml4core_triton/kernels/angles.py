"""Sine and cosine of rotary angles, exact to fp32 at any position a model has.

The product of a 24-bit frequency and a 21-bit position is exact in fp64, and so is what is left of
it after whole quarter turns to 2**-34. The two polynomials are good to an ulp of fp32 on
-pi/4 .. pi/4; the device's own fast sine is not.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cos_sin(position, frequency):
    """cos and sin in fp32 of int64 positions times fp32 frequencies, which broadcast."""
    angle = position.to(tl.float64) * frequency.to(tl.float64)
    turns = tl.floor(angle * 0.6366197723675814 + 0.5)  # quarter turns, to nearest
    # pi / 2 in two parts, the first of 33 bits: its product with fewer than 2**20 turns is exact.
    left = (angle - turns * 1.5707963267341256) - turns * 6.077100506506192e-11
    x = left.to(tl.float32)
    square = x * x
    sine = ((-1.9515296e-4 * square + 8.3321609e-3) * square - 1.6666655e-1) * square * x + x
    cosine = ((2.4433157e-5 * square - 1.3887316e-3) * square + 4.1666646e-2) * square * square
    cosine = cosine - 0.5 * square + 1.0
    quarter = turns.to(tl.int64) & 3
    swapped = (quarter & 1) == 1
    c = tl.where(swapped, sine, cosine)
    s = tl.where(swapped, cosine, sine)
    c = tl.where((quarter == 1) | (quarter == 2), -c, c)
    s = tl.where(quarter >= 2, -s, s)
    return c, s
