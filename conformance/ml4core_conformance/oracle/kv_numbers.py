"""Numbers that cache rows are made of, from their definitions: E4M3, bfloat16 and scales.

Everything is looked up in tables or computed on integers, so that no library's cast is trusted.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MAX = {"e4m3fn": 448.0, "e4m3fnuz": 240.0}
"""Largest finite value; where encoding saturates."""
QUANT_MAX = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}
"""What scales bring a block's largest magnitude to."""


@cache
def e4m3_values(flavour: str) -> Array:
    """fp64 [256]: what each byte stands for. Sign, 4 bits of exponent, 3 of fraction."""
    bias = {"e4m3fn": 7, "e4m3fnuz": 8}[flavour]
    values = np.empty(256)
    for code in range(256):
        exponent, fraction = (code >> 3) & 15, code & 7
        if exponent == 0:  # denormal
            value = fraction * 2.0 ** (1 - bias - 3)
        else:
            value = (8 + fraction) * 2.0 ** (exponent - bias - 3)
        values[code] = -value if code & 0x80 else value
    for code in (0x7F, 0xFF) if flavour == "e4m3fn" else (0x80,):
        values[code] = math.nan
    values.setflags(write=False)
    return values


def e4m3_decode(code: Array, flavour: str) -> Array:
    """fp64 [...] of bytes [...]."""
    return e4m3_values(flavour)[code]


def e4m3_encode(x: Array, flavour: str) -> Array:
    """Bytes [...] of numbers [...]: the nearest value, ties to the even code, saturating; NaN is
    0x7F or, in fnuz, 0x80. Small negative numbers become minus zero where there is one.
    """
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = np.asarray(x, dtype=np.float64)
    last = 0x7E if flavour == "e4m3fn" else 0x7F
    values = e4m3_values(flavour)[: last + 1]
    size = np.minimum(np.abs(x), values[last])
    above = np.clip(np.searchsorted(values, size), 1, last)  # NaN sorts last
    below = above - 1
    middle = (values[below] + values[above]) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    code = np.where(up, above, below).astype(np.uint8)
    negative = np.signbit(x)
    if flavour == "e4m3fnuz":
        negative &= code != 0
    code = np.where(negative, code | 0x80, code)
    nan = 0x7F if flavour == "e4m3fn" else 0x80
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def least_e4m3(x: Array) -> Array:
    """Bytes of e4m3fn [...]: the least number that is not below ``x`` [...] >= 0; 448 at most."""
    values = e4m3_values("e4m3fn")[:0x7F]
    return np.minimum(np.searchsorted(values, x), 0x7E).astype(np.uint8)


def bf16_bits(x: Array) -> Array:
    """uint16 [...] of fp32 numbers [...] without NaN: to nearest, ties to even."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    half = 0x7FFF + ((bits >> 16) & 1)
    return ((bits + half) >> 16).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    """fp64 [...] of uint16 [...]."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bits_of_f32(x: Array) -> Array:
    """Bytes uint8 [..., 4 n] of fp32 numbers [..., n], little endian."""
    return np.ascontiguousarray(x, dtype="<f4").view(np.uint8)


def f32_of_bits(stored: Array) -> Array:
    """fp64 [..., n] of bytes uint8 [..., 4 n]."""
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(stored).view("<f4").astype(np.float64)


def ceil_exponent(amax: float, limit: float) -> int:
    """The least e with ``amax <= limit * 2**e``; ``amax`` is finite and above 0."""
    e = math.frexp(amax / limit)[1] - 1  # within one of the answer
    while amax > math.ldexp(limit, e):
        e += 1
    while amax <= math.ldexp(limit, e - 1):
        e -= 1
    return e


def finite_amax(values: Array) -> Array:
    """fp64 [...]: the largest finite magnitude of [..., n]; 0 where nothing is finite."""
    with np.errstate(invalid="ignore"):
        size = np.abs(np.asarray(values, dtype=np.float64))
    return np.asarray(np.where(np.isfinite(size), size, 0.0).max(-1))


def latent_scale_exponents(tiles: Array) -> Array:
    """int64 [...] of tiles [..., 128] of fp8_ds_mla: ``ceil(log2(max(amax / 448, 1e-4)))``."""
    # 1e-4 lies between 2**-14 and 2**-13.
    return _exponents(finite_amax(tiles), QUANT_MAX["e4m3fn"], least=-13)


def index_scale_exponents(keys: Array, flavour: str = "e4m3fn") -> Array:
    """int64 [...] of index keys or queries [..., D]: ``ceil(log2(max(amax, 1e-4) / quant_max))``.

    The floor 1e-4 is the fp32 number.
    """
    floor = float(np.float32(1e-4))
    return _exponents(np.maximum(finite_amax(keys), floor), QUANT_MAX[flavour])


def _exponents(amax: Array, limit: float, least: int = -127) -> Array:
    flat = [
        least if value == 0 else max(least, ceil_exponent(value, limit))
        for value in amax.ravel().tolist()
    ]
    return np.array(flat, dtype=np.int64).reshape(amax.shape)
