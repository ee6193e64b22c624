"""Casts and products that mean the same on a device and in Triton's interpreter.

The interpreter truncates where a device rounds to nearest, multiplies bf16 as integers, reads NaN
of FP8 as numbers and, before 3.8, knows neither e4m3fnuz nor scaled products. So kernels compute
in fp32 and cast, decode and multiply by what stands here: on a device an instruction each, in the
interpreter arithmetic on bits.

FP8 operands are the type of the matrix units when compiled, and fp32 of the same values when
interpreted; ``FNUZ`` says which flavour.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels of this process run in the interpreter."""

SCALED_DOT = tl.constexpr(
    not triton.knobs.runtime.interpret
    or tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8)
)
"""Whether ``tl.dot_scaled`` is there: the interpreter has it from 3.8 on."""


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
    """``x`` in fp32, of fp32, bf16 or integers; exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        found = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        found = x.to(tl.float32)
    return found


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32. bf16 operands meet in the matrix units, and FP8 ones of ``fp8``."""
    if INTERPRETED:
        found = tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        found = tl.dot(a, b, acc, input_precision="ieee")
    return found


@triton.jit
def fp8_value(byte, FNUZ: tl.constexpr):
    """fp32 values of FP8 bytes uint8; exact, NaN too. In integers, for the interpreter."""
    code = byte.to(tl.int32)
    size = code & 0x7F
    # Exponent and fraction of fp32, 2**120 or 2**119 too small.
    found = (size << 20).to(tl.float32, bitcast=True)
    found = found * (6.646139978924579e35 if FNUZ else 1.329227995784916e36)
    # The sign as a bit: a minus is a difference from zero, and loses that of zero.
    found = (found.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    nan = code == 0x80 if FNUZ else size == 0x7F
    return tl.where(nan, float("nan"), found)


@triton.jit
def fp8(byte, FNUZ: tl.constexpr):
    """Operands of a product from FP8 bytes uint8."""
    if INTERPRETED:
        found = fp8_value(byte, FNUZ)
    elif FNUZ:
        found = byte.to(tl.float8e4b8, bitcast=True)
    else:
        found = byte.to(tl.float8e4nv, bitcast=True)
    return found


@triton.jit
def fp8_rounded(x, FNUZ: tl.constexpr):
    """Operands of a product from fp32 ``x``, which the flavour's range holds: to nearest even."""
    if INTERPRETED:
        found = fp8_value(fp8_code(x, FNUZ), FNUZ)
    elif FNUZ:
        found = x.to(tl.float8e4b8)
    else:
        found = x.to(tl.float8e4nv)
    return found


@triton.jit
def decoded(byte, dtype: tl.constexpr, FNUZ: tl.constexpr):
    """Values of FP8 bytes uint8 in fp32, bf16 or fp16; exact."""
    if INTERPRETED:
        wide = fp8_value(byte, FNUZ)
        # Four significant bits: what narrows them loses nothing.
        found = narrow(wide, dtype) if dtype == tl.bfloat16 else wide.to(dtype)
    else:
        found = fp8(byte, FNUZ).to(dtype)
    return found


@triton.jit
def fp8_code(x, FNUZ: tl.constexpr):
    """FP8 bytes uint8 of fp32: to nearest, ties to even, saturating at 448 or 240; NaN is 0x7F, or
    0x80 in e4m3fnuz, which has no -0.

    In integers: what casts do with overflow and NaN differs between devices.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal numbers: round the fraction to 3 bits and move the exponent's bias.
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    if FNUZ:
        normal = tl.minimum(normal - ((127 - 8) << 3), 0x7F)
        # Denormals, below 2**-7, count 2**-10: with 2**13 the last bit of the sum is worth that.
        small = tl.minimum(size, 0x3C000000).to(tl.float32, bitcast=True)
        denormal = (small + 8192.0).to(tl.int32, bitcast=True) - 0x46000000
        code = tl.where(size < 0x3C000000, denormal, normal)
        code = tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))
        code = tl.where(size > 0x7F800000, 0x80, code)
    else:
        normal = tl.minimum(normal - ((127 - 7) << 3), 0x7E)
        # Denormals, below 2**-6, count 2**-9.
        small = tl.minimum(size, 0x3C800000).to(tl.float32, bitcast=True)
        denormal = (small + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, denormal, normal)
        code = tl.where(size > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def e2m1(code):
    """fp32 values of 4-bit codes in the low bits of int32; what stands above them is ignored."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0(byte):
    """fp32 powers of two of bytes int32: 0 is 2**-127, 255 NaN."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _grouped_values(codes, scale, ROWS: tl.constexpr, K: tl.constexpr, FP4: tl.constexpr):
    """fp32 [ROWS, K] of codes uint8, two a byte if FP4, and e8m0 scales uint8 [ROWS, K / 32]."""
    if FP4:
        wide = codes.to(tl.int32)
        values = tl.reshape(tl.join(e2m1(wide), e2m1(wide >> 4)), (ROWS, K))
    else:
        values = fp8_value(codes, False)
    groups = tl.reshape(values, (ROWS, K // 32, 32)) * e8m0(scale.to(tl.int32))[:, :, None]
    return tl.reshape(groups, (ROWS, K))


@triton.jit
def scaled_dot(x, x_scale, w, w_scale, acc, FP4: tl.constexpr):
    """acc + x @ w^T in fp32 of x [M, K] in e2m1 or e4m3 and w [N, K] in e2m1, uint8 codes each, two
    a byte in e2m1, with e8m0 scales uint8 of 32 columns.
    """
    if SCALED_DOT and FP4:
        found = tl.dot_scaled(x, x_scale, "e2m1", tl.trans(w), w_scale, "e2m1", acc)
    elif SCALED_DOT:
        codes = x.to(tl.float8e4nv, bitcast=True)
        found = tl.dot_scaled(codes, x_scale, "e4m3", tl.trans(w), w_scale, "e2m1", acc)
    else:
        COLUMNS: tl.constexpr = 2 * w.shape[1]
        left = _grouped_values(x, x_scale, x.shape[0], COLUMNS, FP4)
        right = _grouped_values(w, w_scale, w.shape[0], COLUMNS, True)
        found = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
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


def rows_of(x: Tensor) -> Tensor:
    """``x`` [..., K] as rows [T, K] with a last stride of 1; copied only where strides need it."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


def next_power(n: int) -> int:
    """The least power of two that is not below ``n``, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float32 if dtype == torch.float32 else tl.bfloat16
