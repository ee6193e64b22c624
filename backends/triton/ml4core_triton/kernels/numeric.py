"""Casts and products that mean the same on a device and in Triton's interpreter.

The interpreter of Triton 3.6 keeps bf16 as 16-bit integers: it truncates where the device rounds to
nearest, reads denormals wrongly, and multiplies the integers. So kernels compute in fp32, come from
bf16 by ``widen``, go to it by ``narrow`` and multiply with ``dot``; on a device each is one
instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.interpreter import is_on, patch_once

INTERPRETED = tl.constexpr(is_on())
"""Whether kernels of this process run in the interpreter."""

if is_on():
    patch_once()


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 ``x`` in fp32 or bf16: to nearest, ties to even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        found = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        found = x.to(dtype)
    return found


@triton.jit
def widen(x):
    """``x`` in fp32, of fp32, bf16 or integers; exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        found = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        found = x.to(tl.float32)
    return found


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
def dot(a, b, acc):
    """acc + a @ b in fp32. bf16 and FP8 operands meet in the matrix units; fp32 ones aren't cut to
    tf32.
    """
    if INTERPRETED:
        found = tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        found = tl.dot(a, b, acc, input_precision="ieee")
    return found


@triton.jit
def finite_size(x):
    """|x| of fp32, 0 where it isn't finite."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


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
def e2m1(code):
    """fp32 values of 4-bit codes in the low bits of int32; what stands above them is ignored.

    The code's exponent and fraction are fp16's upper ones, 2**14 too small.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0(byte):
    """fp32 powers of two of bytes int32: 0 is 2**-127, 255 NaN."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


def rows_of(x: Tensor) -> Tensor:
    """``x`` [..., K] as rows [T, K] with a last stride of 1; copied only where strides need it."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


def next_power(n: int) -> int:
    """The least power of two that is not below ``n``, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float32 if dtype == torch.float32 else tl.bfloat16
