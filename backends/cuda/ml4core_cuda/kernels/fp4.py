"""FP4 codes, decoded in pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.numeric import INTERPRETED, e2m1, e8m0

# Four bytes of two codes each, and their scales in bf16. A code n becomes n << 12 | n << 6, of
# which the sign, exponent and fraction of bf16 stay: its value, 2**126 too small. That factor
# (0x7E80) and the scale follow one after the other, as their product may be beyond bf16.
_E2M1_PAIRS = tl.constexpr("""
{
  .reg .b32 a, b, c, f;
  mov.b32 f, 0x7E807E80;
  prmt.b32 a, $4, 0, 0x4140;
  prmt.b32 b, $4, 0, 0x4342;
  and.b32 c, a, 0x000F000F;
  mul.lo.u32 c, c, 0x1040;
  and.b32 c, c, 0x81C081C0;
  mul.rn.bf16x2 c, c, f;
  mul.rn.bf16x2 $0, c, $5;
  and.b32 c, b, 0x000F000F;
  mul.lo.u32 c, c, 0x1040;
  and.b32 c, c, 0x81C081C0;
  mul.rn.bf16x2 c, c, f;
  mul.rn.bf16x2 $1, c, $6;
  and.b32 c, a, 0x00F000F0;
  mul.lo.u32 c, c, 0x104;
  and.b32 c, c, 0x81C081C0;
  mul.rn.bf16x2 c, c, f;
  mul.rn.bf16x2 $2, c, $5;
  and.b32 c, b, 0x00F000F0;
  mul.lo.u32 c, c, 0x104;
  and.b32 c, c, 0x81C081C0;
  mul.rn.bf16x2 c, c, f;
  mul.rn.bf16x2 $3, c, $6;
}
""")


# The same with one factor: their scales in bf16 are larger by 2**119, or by 2**122 of e8m0.
_E2M1_PAIRS_ONCE = tl.constexpr("""
{
  .reg .b32 a, c;
  prmt.b32 a, $4, 0, 0x4140;
  and.b32 c, a, 0x000F000F;
  mul.lo.u32 c, c, 0x1040;
  and.b32 c, c, 0x81C081C0;
  mul.rn.bf16x2 $0, c, $5;
  and.b32 c, a, 0x00F000F0;
  mul.lo.u32 c, c, 0x104;
  and.b32 c, c, 0x81C081C0;
  mul.rn.bf16x2 $2, c, $5;
  prmt.b32 a, $4, 0, 0x4342;
  and.b32 c, a, 0x000F000F;
  mul.lo.u32 c, c, 0x1040;
  and.b32 c, c, 0x81C081C0;
  mul.rn.bf16x2 $1, c, $6;
  and.b32 c, a, 0x00F000F0;
  mul.lo.u32 c, c, 0x104;
  and.b32 c, c, 0x81C081C0;
  mul.rn.bf16x2 $3, c, $6;
}
""")

SMALL = tl.constexpr(128.0)
"""What values of ``small_pairs`` are too small by."""


@triton.jit
def small_pairs(byte, scale):
    """Low and high codes of bytes uint8 times scales, e4m3 numbers in fp32, which broadcast: bf16,
    ``SMALL`` times too small, which is exact and leaves one multiplication out. Not in the
    interpreter.
    """
    return tl.inline_asm_elementwise(
        _E2M1_PAIRS_ONCE,
        "=&r,=&r,=&r,=&r,r,r,r",
        [byte, (scale * 6.646139978924579e35).to(tl.bfloat16)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1_pairs(byte, scale, dtype: tl.constexpr):
    """Low and high codes of bytes uint8 times fp32 scales, which broadcast, in fp32 or bf16.

    Exact where the scale is an e4m3 or an e8m0 number: the product has 6 significant bits at most.
    On a device 22 instructions of integers and bf16 pairs make eight values.
    """
    if INTERPRETED or dtype == tl.float32:
        code = byte.to(tl.int32)
        low = (e2m1(code) * scale).to(dtype)
        high = (e2m1(code >> 4) * scale).to(dtype)
    else:
        low, high = tl.inline_asm_elementwise(
            _E2M1_PAIRS,
            "=&r,=&r,=&r,=&r,r,r,r",
            [byte, scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def scaled_pairs(byte, scale, WAY: tl.constexpr):
    """Low and high codes of bytes uint8 times scales, which broadcast: bf16, in the interpreter
    fp32, too small by what ``size_of`` says of this ``WAY``; exact.

    It says how ``scale``, uint8, is read: "e4m3"; "e8m0"; or "e8m0 once", which is a multiplication
    less, and gives numbers that aren't finite for scales above 2**5.
    """
    number = decoded(scale, tl.float32, False) if WAY == "e4m3" else e8m0(scale.to(tl.int32))
    if INTERPRETED:
        low, high = e2m1_pairs(byte, number, tl.float32)
    elif WAY == "e8m0":
        low, high = e2m1_pairs(byte, number, tl.bfloat16)
    elif WAY == "e4m3":
        low, high = small_pairs(byte, number)
    else:  # 2**122 times the scale, by its exponent; infinite at most
        exponent = tl.minimum(scale.to(tl.int32), 133) + 122
        low, high = tl.inline_asm_elementwise(
            _E2M1_PAIRS_ONCE,
            "=&r,=&r,=&r,=&r,r,r,r",
            [byte, (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.constexpr_function
def size_of(way: str) -> float:
    """What numbers of ``scaled_pairs`` are too small by."""
    sizes = {"e4m3": SMALL.value, "e8m0 once": 16.0, "e8m0": 1.0}
    return 1.0 if INTERPRETED.value else sizes[way]


# Four bytes of two codes each. A code n becomes the byte (n & 8) << 4 | (n & 7) << 2: its value as
# e4m3, 2**6 too small, also where it is denormal.
_E4M3_PAIRS = tl.constexpr("""
{
  .reg .b32 a, b;
  shl.b32 a, $2, 4;
  shl.b32 b, $2, 2;
  and.b32 b, b, 0x1C1C1C1C;
  lop3.b32 $0, a, 0x80808080, b, 0xEA;
  shr.b32 b, $2, 2;
  and.b32 b, b, 0x1C1C1C1C;
  lop3.b32 $1, $2, 0x80808080, b, 0xEA;
}
""")

E4M3_SIZE = tl.constexpr(64.0)
"""What values of ``e2m1_numbers`` are too small by."""


@triton.jit
def e2m1_numbers(byte):
    """Low and high codes of bytes uint8 in fp32, ``E4M3_SIZE`` times too small; exact.

    On a device by way of e4m3, which is unpacked two at a time: 2.4 instructions a value.
    """
    if INTERPRETED:
        code = byte.to(tl.int32)
        low, high = e2m1(code) / E4M3_SIZE, e2m1(code >> 4) / E4M3_SIZE
    else:
        low, high = tl.inline_asm_elementwise(
            _E4M3_PAIRS,
            "=&r,=&r,r",
            [byte],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
        low, high = decoded(low, tl.float32, False), decoded(high, tl.float32, False)
    return low, high
