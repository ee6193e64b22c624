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

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels of this process run in the interpreter."""


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
def dot(a, b, acc):
    """acc + a @ b in fp32. bf16 operands meet in the matrix units; fp32 ones aren't cut to tf32."""
    if INTERPRETED:
        found = tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        found = tl.dot(a, b, acc, input_precision="ieee")
    return found


@triton.jit
def e4m3(byte, dtype: tl.constexpr):
    """Values of e4m3fn bytes uint8 in fp32, bf16 or as they are; exact. 0x7F and 0xFF are NaN."""
    value = byte.to(tl.float8e4nv, bitcast=True)
    if dtype == tl.float8e4nv:
        found = value
    elif INTERPRETED:
        wide = value.to(tl.float32)
        found = tl.where((byte & 0x7F) == 0x7F, float("nan"), wide).to(dtype)
    else:
        # By way of fp32: the device has no fast cast from fp16 to bf16.
        found = value.to(tl.float16).to(tl.float32).to(dtype)
    return found


@triton.jit
def e2m1(code):
    """fp32 values of 4-bit codes in the low bits of int32; what stands above them is ignored.

    The code's exponent and fraction are fp16's upper ones, 2**14 too small.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


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
            "=r,=r,=r,=r,r,r,r",
            [byte, scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def e8m0(byte):
    """fp32 powers of two of bytes int32: 0 is 2**-127, 255 NaN."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def finite_size(x):
    """|x| of fp32, 0 where it isn't finite."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def e4m3_code(x):
    """e4m3fn bytes uint8 of fp32: to nearest, ties to even, saturating; NaN is 0x7F.

    In integers: what casts do with overflow and NaN differs between devices.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal numbers, from 2**-6: round the fraction to 3 bits and move the exponent's bias.
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    normal = tl.minimum(normal - ((127 - 7) << 3), 0x7E)
    # Denormals count 2**-9: adding 2**14 (with its last bit worth 2**-9) rounds to nearest even.
    small = tl.minimum(size, 0x3C800000).to(tl.float32, bitcast=True)
    denormal = (small + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, denormal, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits for all that the launch before wrote, in a launch that was allowed to begin ahead of
    its end. Nothing of it may be read, and nothing that it reads be written, before.
    """
    if DEPENDENT and not INTERPRETED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """Lets the next launch's programs come up while this one still runs."""
    if DEPENDENT and not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()


def dependent(wanted: bool) -> dict[str, bool]:
    """Options of a launch that may begin ahead of the end of the one before."""
    return {"launch_pdl": True} if wanted and not INTERPRETED.value else {}


def rows_of(x: Tensor) -> Tensor:
    """``x`` [..., K] as rows [T, K] with a last stride of 1; copied only where strides need it."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


def next_power(n: int) -> int:
    """The least power of two that is not below ``n``, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def sm_count(device: torch.device) -> int:
    """Multiprocessors of the device; those of an H200 for tensors without data. A few on the host,
    where one program follows the other.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4 if device.type == "cpu" else 132
