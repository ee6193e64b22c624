"""Inputs of products with quantised weights, quantised first where a deployment asks.

``fp8_block``: e4m3 in blocks of 128 columns with a scale each; ``fp8_tensor``: e4m3 with a scale a
row, so that a row doesn't depend on its batch; ``mxfp4``: e2m1 in groups of 32 with e8m0 scales, by
the rule of the weights, even. ``mxfp8``: e4m3 in such groups, which FP4 weights meet in the matrix
units of gfx950.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_rocm.kernels.products import BY_BLOCK, BY_ROW, GROUPS_FP4, GROUPS_FP8, PLAIN
from ml4core_rocm.kernels.target import fp8_products, scales_in_products
from ml4core_triton.kernels.fp8 import fp8_code, fp8_value
from ml4core_triton.kernels.numeric import (
    e2m1,
    e8m0,
    finite_size,
    narrow,
    power_of_two,
    rows_of,
    widen,
)
from ml4core_triton.kernels.quantize import e2m1_code
from ml4core_triton.kernels.quantized_rows import by_block, by_row
from ml4core_triton.kernels.weights import BF16, FP8_BLOCK, FP8_TENSOR, FP32, MXFP4, WeightArgs

ACTS = ("fp8_block", "fp8_tensor", "mxfp4", "mxfp8")
GROUP = 32

_KINDS: Mapping[str, int] = MappingProxyType(
    {
        "fp8_block": BY_BLOCK,
        "fp8_tensor": BY_ROW,
        "mxfp4": GROUPS_FP4,
        "mxfp8": GROUPS_FP8,
    }
)

_EVEN = tl.constexpr(0x200000)
"""What the even rule adds to the bits of a group's largest magnitude: fractions from 1.75 carry."""
_ROUNDUP = tl.constexpr(0x1FFFFF)
"""The same for e4m3: fractions above 1.75 carry, so that nothing saturates."""


@dataclass(frozen=True)
class Quantized:
    """Rows of a product's input.

    Attributes:
        data: codes uint8 [T, K], or two a byte [T, K / 2].
        scale: fp32 [T, ceil(K / 128)] or [T]; uint8 e8m0 [T, K / 32].
    """

    act: str
    data: Tensor
    scale: Tensor


@triton.jit
def _power_below(exponent):
    """2**-exponent in fp32 for exponents -127..127."""
    return tl.where(exponent >= 127, 5.877471754111438e-39, power_of_two(-exponent))


@triton.jit
def _exponent_of(bits, FP4: tl.constexpr):
    """int32 exponents of groups whose largest magnitudes have these bits of fp32."""
    carry = _EVEN if FP4 else _ROUNDUP
    top = 2 if FP4 else 8
    return ((bits + carry) >> 23) - (127 + top)


@triton.jit
def _values(x, FP4: tl.constexpr):
    """fp32 ``x``, rounded to e2m1 or e4m3."""
    return e2m1(e2m1_code(x)) if FP4 else fp8_value(fp8_code(x, False), False)


@triton.jit
def _group_kernel(
    x, data, scale, K, x_row, FP4: tl.constexpr, VALUES: tl.constexpr, GROUPS: tl.constexpr
):
    """Codes and e8m0 scales of groups of 32, or with ``VALUES`` what they stand for: grid (T,
    blocks of groups).
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    fits = columns < K
    value = widen(tl.load(x + row * x_row + columns, mask=fits, other=0.0))
    bits = tl.max(finite_size(value), axis=1).to(tl.int32, bitcast=True)
    exponent = _exponent_of(bits, FP4)
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    small = value * _power_below(exponent)[:, None]
    if VALUES:
        found = _values(small, FP4)
        found = narrow(found * e8m0(exponent + 127)[:, None], data.dtype.element_ty)
        tl.store(data + row * K + columns, found, mask=fits)
    elif FP4:
        low, high = tl.split(e2m1_code(small).reshape([GROUPS, 16, 2]))
        half = group[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(data + row * (K // 2) + half, (low | (high << 4)).to(tl.uint8), half < K // 2)
    else:
        tl.store(data + row * K + columns, fp8_code(small, False), mask=fits)
    if not VALUES:
        tl.store(scale + row * (K // 32) + group, (exponent + 127).to(tl.uint8), group < K // 32)


def quantized(x: Tensor, act: str) -> Quantized:
    """Rows ``x`` [T, K] in the format of ``act``. ``ValueError`` for one that isn't of ``ACTS``,
    and for rows that groups of 32 don't fill.
    """
    if act not in ACTS:
        raise ValueError(f"activations are quantised to {', '.join(ACTS)}, not to {act!r}")
    x = rows_of(x)
    rows, width = x.shape
    if act.startswith("mx") and width % GROUP:
        raise ValueError(f"{act} has groups of {GROUP} values, which don't fill rows of {width}")

    def codes(count: int) -> Tensor:
        return torch.empty(rows, count, dtype=torch.uint8, device=x.device)

    if act == "fp8_block":
        found = Quantized(act, *by_block(x))
    elif act == "fp8_tensor":
        found = Quantized(act, *by_row(x))
    else:
        fp4 = act == "mxfp4"
        found = Quantized(act, codes(width // 2 if fp4 else width), codes(width // GROUP))
        if rows:
            grid = (rows, triton.cdiv(width // GROUP, 32))
            _group_kernel[grid](
                x, found.data, found.scale, width, x.stride(0), FP4=fp4, VALUES=False, GROUPS=32
            )  # fmt: skip
    return found


@dataclass(frozen=True)
class Activation:
    """Rows of a product's input as its kernel takes them.

    Attributes:
        scale: the data itself for plain numbers.
        kind: of ``products``.
        wide: dtype in which operands meet.
        codes: whether they meet as FP8 instead.
        stride, scale_stride: between rows.
    """

    data: Tensor
    scale: Tensor
    kind: int
    wide: Any
    codes: bool
    rows: int
    stride: int
    scale_stride: int

    @property
    def grouped(self) -> bool:
        """Whether its scales go into the matrix units."""
        return self.kind in (GROUPS_FP4, GROUPS_FP8)


def activation(x: Tensor, weight: WeightArgs, act: str | None) -> Activation:
    """``x`` [T, K] for a product with ``weight``, quantised to ``act`` if the weight is quantised.

    ``ValueError`` for an ``act`` that isn't one of ``ACTS``.
    """
    if act is not None and act not in ACTS:
        raise ValueError(f"activations are quantised to {', '.join(ACTS)}, not to {act!r}")
    x = rows_of(x)
    rows, width = x.shape
    if act is None or weight.format in (FP32, BF16):
        wide = torch.float32 in (x.dtype, weight.data.dtype)
        meet = tl.float32 if wide else tl.bfloat16
        return Activation(x, x, PLAIN, meet, False, rows, x.stride(0), 0)
    if act.startswith("mx") and not (weight.format == MXFP4 and scales_in_products(x.device)):
        values = group_values(x, act)
        meet = tl.float32 if x.dtype == torch.float32 else tl.bfloat16
        return Activation(values, values, PLAIN, meet, False, rows, width, 0)
    own = quantized(x, act)
    codes = weight.format in (FP8_BLOCK, FP8_TENSOR) and fp8_products(x.device)
    strides = own.data.stride(0), own.scale.stride(0)
    return Activation(own.data, own.scale, _KINDS[act], tl.bfloat16, codes, rows, *strides)


def group_values(x: Tensor, act: str) -> Tensor:
    """What the codes of ``mxfp4`` or ``mxfp8`` stand for, in x's dtype, which holds them."""
    rows, width = x.shape
    if width % GROUP:
        raise ValueError(f"{act} has groups of {GROUP} values, which don't fill rows of {width}")
    data = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(width // GROUP, 32))
        _group_kernel[grid](
            x, data, data, width, x.stride(0), FP4=act == "mxfp4", VALUES=True, GROUPS=32
        )  # fmt: skip
    return data
