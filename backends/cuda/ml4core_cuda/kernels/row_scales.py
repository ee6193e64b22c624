"""Values and scales of cache rows, by integers where a cast differs between devices."""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_cuda.kernels.numeric import INTERPRETED


@triton.jit
def scale_exponent(amax):
    """The least k with ``amax`` <= 448 * 2**k, int32, of fp32 ``amax`` >= 0; exact for normal ones.

    448 is 1.75 * 2**8, so a mantissa above 1.75 takes one more.
    """
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """2**exponent in fp32, for exponents -126..127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """The bits uint16 of fp32 ``x`` in bfloat16, to nearest even; every NaN is 0x7FC0.

    In integers: which NaN a cast gives differs between devices, and cache rows are compared as
    bytes.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def widen(x):
    """bfloat16 or fp32 ``x`` in fp32; the interpreter's own cast loses bfloat16's denormals."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide
