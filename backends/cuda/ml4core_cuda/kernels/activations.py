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

from ml4core_cuda.kernels.numeric import (
    INTERPRETED,
    e2m1,
    e4m3_code,
    e8m0,
    finite_size,
    narrow,
    widen,
)
from ml4core_cuda.kernels.products import CODES_BY_BLOCK, CODES_BY_ROW, PLAIN
from ml4core_cuda.kernels.quantize import e2m1_code, mxfp4_exponent
from ml4core_cuda.kernels.weight_tiles import (
    BF16,
    FP8_BLOCK,
    FP8_TENSOR,
    FP32,
    K_TILE,
    WeightArgs,
    is_fp4,
)

ACTS = ("fp8_block", "fp8_tensor", "mxfp4")
_TILE = tl.constexpr(K_TILE)


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
    if is_fp4(weight.format) and (x.stride(0) % 2 or x.storage_offset() % 2):
        x = x.clone(memory_format=torch.contiguous_format)  # it is read two columns at a time
    if act is None or weight.format in (FP32, BF16):
        return Activation(x, x, PLAIN, x.shape[0], x.stride(0), 0)
    return quantized(x, act)


def quantized(x: Tensor, act: str) -> Activation:
    """Rows ``x`` [T, K] in the format of ``act``."""
    rows, width = x.shape
    if act == "mxfp4":
        data = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        if rows:
            _mxfp4_kernel[(rows, triton.cdiv(width, 1024))](x, data, width, x.stride(0), BLOCK=1024)
        return Activation(data, data, PLAIN, rows, width, 0)
    data = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    if act == "fp8_block":
        blocks = triton.cdiv(width, K_TILE)
        scale = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
        if rows:
            _block_kernel[(rows, triton.cdiv(blocks, 8))](
                x, data, scale, width, x.stride(0), BLOCKS=8
            )
        return Activation(data, scale, CODES_BY_BLOCK, rows, width, blocks)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _row_kernel[(rows,)](x, data, scale, width, x.stride(0), BLOCK=1024)
    return Activation(data, scale, CODES_BY_ROW, rows, width, 1)


@triton.jit
def _block_kernel(x, data, scale, K, x_row, BLOCKS: tl.constexpr):
    """Codes and scales of 128-column blocks: grid (T, groups of blocks)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = block[:, None] * _TILE + tl.arange(0, _TILE)[None, :]
    fits = columns < K
    value = widen(tl.load(x + row * x_row + columns, mask=fits, other=0.0))
    each = tl.div_rn(tl.maximum(tl.max(finite_size(value), axis=1), 1e-10), 448.0)
    code = e4m3_code(tl.div_rn(value, tl.broadcast_to(each[:, None], value.shape)))
    tl.store(data + row * K + columns, code, mask=fits)
    tl.store(scale + row * tl.cdiv(K, _TILE) + block, each, mask=block < tl.cdiv(K, _TILE))


@triton.jit
def _row_kernel(x, data, scale, K, x_row, BLOCK: tl.constexpr):
    """Codes of a row under one scale: grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = widen(tl.load(x + row * x_row + columns, mask=columns < K, other=0.0))
        largest = tl.maximum(largest, finite_size(value))
    each = tl.div_rn(tl.maximum(tl.max(largest, axis=0), 1e-10), 448.0)
    tl.store(scale + row, each)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = widen(tl.load(x + row * x_row + columns, mask=columns < K, other=0.0))
        code = e4m3_code(tl.div_rn(value, tl.zeros_like(value) + each))
        tl.store(data + row * K + columns, code, mask=columns < K)


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
