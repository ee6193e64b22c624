"""FP8 as bytes and as operands of products, in both flavours: ``FNUZ`` says which.

Operands are the type of the matrix units when compiled, and fp32 of the same values when
interpreted: the interpreter reads NaN of FP8 as numbers and, before 3.8, doesn't know e4m3fnuz.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from ml4core_triton.kernels.numeric import INTERPRETED, narrow

HALF_BIAS = tl.constexpr(1.152921504606847e18)
"""2**60: what ``moved`` gives is 2**120 too small."""


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
    """Values of FP8 bytes uint8 in fp32, bf16 or fp16; exact. As they are if ``dtype`` is FP8."""
    if INTERPRETED:
        wide = fp8_value(byte, FNUZ)
        # Four significant bits: what narrows them loses nothing.
        if dtype.is_fp8():
            found = wide
        elif dtype == tl.bfloat16:
            found = narrow(wide, dtype)
        else:
            found = wide.to(dtype)
    elif dtype.is_fp8():
        found = fp8(byte, FNUZ)
    elif is_hip():
        found = fp8(byte, FNUZ).to(dtype)
    else:
        # By way of fp32: NVIDIA's have no fast cast from fp16 to bf16.
        found = fp8(byte, FNUZ).to(tl.float16).to(tl.float32).to(dtype)
    return found


@triton.jit
def moved(byte):
    """bf16 values, 2**120 too small, of E4M3 bytes; where one of 16 is NaN, one of them is NaN.

    In integers, 2.7 instructions a value: conversions by way of fp16 and fp32 are fewer, but issue
    at a quarter of the rate.
    """
    if INTERPRETED:
        # fp32 holds what is too small for it to be normal as well.
        found = narrow(fp8_value(byte, False) * 7.52316384526264e-37, tl.bfloat16)
    else:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, n, o;
            .reg .pred p;
            and.b32 n, $8, 0x7f7f7f7f;
            prmt.b32 t, n, 0, 0x1404;
            shr.u32 t, t, 4;
            prmt.b32 o, $8, 0, 0x1404;
            lop3.b32 $0, o, 0x80008000, t, 0xEA;
            prmt.b32 t, n, 0, 0x3424;
            shr.u32 t, t, 4;
            prmt.b32 o, $8, 0, 0x3424;
            lop3.b32 $1, o, 0x80008000, t, 0xEA;
            .reg .b32 s;
            add.u32 s, n, 0x01010101;
            and.b32 n, $9, 0x7f7f7f7f;
            prmt.b32 t, n, 0, 0x1404;
            shr.u32 t, t, 4;
            prmt.b32 o, $9, 0, 0x1404;
            lop3.b32 $2, o, 0x80008000, t, 0xEA;
            prmt.b32 t, n, 0, 0x3424;
            shr.u32 t, t, 4;
            prmt.b32 o, $9, 0, 0x3424;
            lop3.b32 $3, o, 0x80008000, t, 0xEA;
            add.u32 n, n, 0x01010101;
            or.b32 s, s, n;
            and.b32 n, $10, 0x7f7f7f7f;
            prmt.b32 t, n, 0, 0x1404;
            shr.u32 t, t, 4;
            prmt.b32 o, $10, 0, 0x1404;
            lop3.b32 $4, o, 0x80008000, t, 0xEA;
            prmt.b32 t, n, 0, 0x3424;
            shr.u32 t, t, 4;
            prmt.b32 o, $10, 0, 0x3424;
            lop3.b32 $5, o, 0x80008000, t, 0xEA;
            add.u32 n, n, 0x01010101;
            or.b32 s, s, n;
            and.b32 n, $11, 0x7f7f7f7f;
            prmt.b32 t, n, 0, 0x1404;
            shr.u32 t, t, 4;
            prmt.b32 o, $11, 0, 0x1404;
            lop3.b32 $6, o, 0x80008000, t, 0xEA;
            prmt.b32 t, n, 0, 0x3424;
            shr.u32 t, t, 4;
            prmt.b32 o, $11, 0, 0x3424;
            lop3.b32 $7, o, 0x80008000, t, 0xEA;
            add.u32 n, n, 0x01010101;
            or.b32 s, s, n;
            and.b32 s, s, 0x80808080;
            setp.ne.u32 p, s, 0;
            @p mov.b32 $0, 0x7fc07fc0;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [byte],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=16,
        )
    return found


@triton.jit
def fp8_code(x, FNUZ: tl.constexpr):
    """FP8 bytes uint8 of fp32: to nearest, ties to even, saturating at 448 or 240; NaN is 0x7F, or
    0x80 in e4m3fnuz, which has no -0.
    """
    if INTERPRETED or FNUZ or is_hip():
        found = _code_of(x, FNUZ)
    else:
        found = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return found


@triton.jit
def _code_of(x, FNUZ: tl.constexpr):
    """In integers: what casts do with overflow and NaN differs between devices."""
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
