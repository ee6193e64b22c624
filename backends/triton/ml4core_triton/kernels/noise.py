"""Random numbers of a seed, a position, a purpose and an index alone, as core's own ops draw them.

SplitMix64 as a counter: 64-bit integers wrap alike everywhere, so a row's noise is the same
whatever its batch, and a request draws the tokens that it would draw on another backend, but for
the last bit of a logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

DRAW, ACCEPT, RESIDUAL = range(3)
"""Purposes: two decisions about one position share no noise."""


@triton.jit
def _mix(x):
    """int64; shifts fill with zeros."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def row_key(seed, position, purpose):
    """int64 keys of seeds and positions int64."""
    key = _mix(seed + -7046029254386353131)
    key = _mix(key + position * -7046029254386353131)
    return _mix(key + purpose)


@triton.jit
def uniform(key, index):
    """fp32 in (0, 1) of an int64 key and indices from 0, fine near 0."""
    bits = _mix(key + (key * 0 + index + 1) * -7046029254386353131)
    high = ((bits >> 32) & 0xFFFFFFFF).to(tl.float32)
    return tl.minimum((high + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def log1p_negated(u):
    """log(1 - u) of u in (0, 1), fine near 0, where 1 - u would lose it."""
    small = -u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.015625, small, tl.log(1.0 - tl.where(u < 0.015625, 0.5, u)))


@triton.jit
def gumbel(key, index):
    """Standard Gumbel noise fp32; always finite."""
    return -tl.log(-log1p_negated(uniform(key, index)))
