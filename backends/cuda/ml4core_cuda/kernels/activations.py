"""Activations as products take them: as they are, or quantised first where a deployment asks.

A session opened with ``act:fp8_block`` among its needs quantises the bf16 input of every product
with a quantised weight to e4m3 in blocks of 128; with ``act:fp8_tensor`` with a scale a row, so
that a row doesn't depend on its batch; with ``act:mxfp4`` to e2m1 in groups of 32, whose values are
bf16 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_cuda.kernels.products import CODES_BY_BLOCK, CODES_BY_ROW, PLAIN
from ml4core_triton.kernels.numeric import INTERPRETED, e2m1, e8m0, finite_size, narrow, widen
from ml4core_triton.kernels.quantize import e2m1_code, mxfp4_exponent
from ml4core_triton.kernels.quantized_rows import by_block, by_row
from ml4core_triton.kernels.weights import (
    BF16,
    FP8_BLOCK,
    FP8_TENSOR,
    FP32,
    WeightArgs,
    is_fp4,
)

ACTS = ("fp8_block", "fp8_tensor", "mxfp4")


@dataclass(frozen=True)
class Activation:
    """Rows of a product's input.

    Attributes:
        data: numbers, or codes uint8 of a quantised kind.
        scale: fp32 [T, ceil(K / 128)] or [T]; the data itself for plain numbers.
        kind: of ``products``.
        stride: between rows of the data.
    """

    data: Tensor
    scale: Tensor
    kind: int
    rows: int
    stride: int
    scale_stride: int

    def meets(self, weight: WeightArgs) -> Any:
        """The dtype of both operands in the matrix units."""
        if self.kind != PLAIN:
            native = weight.format in (FP8_BLOCK, FP8_TENSOR) and not INTERPRETED.value
            return tl.float8e4nv if native else tl.bfloat16
        wide = self.data.dtype == torch.float32 or weight.format == FP32
        return tl.float32 if wide else tl.bfloat16


def activation(x: Tensor, weight: WeightArgs, act: str | None) -> Activation:
    """``x`` [T, K], its last axis contiguous or copied to be so, for a product with ``weight``.

    ``ValueError`` for an ``act`` that isn't one of ``ACTS``.
    """
    if act is not None and act not in ACTS:
        raise ValueError(f"activations are quantised to {', '.join(ACTS)}, not to {act!r}")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    x = paired(x, weight)
    if act is None or weight.format in (FP32, BF16):
        return Activation(x, x, PLAIN, x.shape[0], x.stride(0), 0)
    return quantized(x, act)


def paired(x: Tensor, weight: WeightArgs) -> Tensor:
    """``x`` [.., K], copied if some of its rows begin at an odd element and the weight is in FP4:
    products with it read two columns at a time.
    """
    odd = x.storage_offset() % 2 or any(stride % 2 for stride in x.stride()[:-1])
    return x.clone(memory_format=torch.contiguous_format) if is_fp4(weight.format) and odd else x


def quantized(x: Tensor, act: str) -> Activation:
    """Rows ``x`` [T, K] in the format of ``act``."""
    rows, width = x.shape
    if act == "mxfp4":
        data = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        if rows:
            _mxfp4_kernel[(rows, triton.cdiv(width, 1024))](x, data, width, x.stride(0), BLOCK=1024)
        return Activation(data, data, PLAIN, rows, width, 0)
    if act == "fp8_block":
        data, scale = by_block(x)
        return Activation(data, scale, CODES_BY_BLOCK, rows, width, scale.shape[1])
    data, scale = by_row(x)
    return Activation(data, scale, CODES_BY_ROW, rows, width, 1)


@triton.jit
def _mxfp4_kernel(x, data, K, x_row, BLOCK: tl.constexpr):
    """What the codes of 32-column groups stand for, rule ``even``: grid (T, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    columns = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    fits = columns < K
    value = widen(tl.load(x + row * x_row + columns, mask=fits, other=0.0))
    exponent = mxfp4_exponent(tl.max(finite_size(value), axis=1), 0x200000)
    code = e2m1_code(value * e8m0(127 - exponent)[:, None])
    found = e2m1(code) * e8m0(127 + exponent)[:, None]
    tl.store(data + row * K + columns, narrow(found, data.dtype.element_ty), mask=fits)
