"""Rows of activations as e4m3 codes: with a scale a block of 128 columns, or one a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.fp8 import fp8_code
from ml4core_triton.kernels.numeric import INTERPRETED, finite_size, widen

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)


def by_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, K] and scales fp32 [T, ceil(K / 128)] of rows ``x``, dense inside."""
    rows, width = x.shape
    blocks = triton.cdiv(width, BLOCK)
    data = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(blocks, 8))
        _block_kernel[grid](x, data, scale, width, x.stride(0), BLOCKS=8)
    return data, scale


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, K] and scales fp32 [T] of rows ``x``, dense inside."""
    rows, width = x.shape
    data = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _row_kernel[(rows,)](x, data, scale, width, x.stride(0), BLOCK=1024)
    return data, scale


@triton.jit
def _quotients(value, each):
    """value / each, as a division rounds it, where none is beyond 448 but those that aren't finite.

    The inverse is shared by what shares ``each``; two corrections make good for its rounding.
    """
    if INTERPRETED:
        found = tl.div_rn(value, each)
    else:
        inverse = tl.div_rn(1.0, each)
        first = value * inverse
        found = tl.fma(tl.fma(-first, each, value), inverse, first)
        found = tl.fma(tl.fma(-found, each, value), inverse, found)
        # Infinity less infinity is none.
        found = tl.where(tl.abs(first) < float("inf"), found, first)
    return found


@triton.jit
def _block_kernel(x, data, scale, K, x_row, BLOCKS: tl.constexpr):
    """Codes and scales of 128-column blocks: grid (T, groups of blocks)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    fits = columns < K
    value = widen(tl.load(x + row * x_row + columns, mask=fits, other=0.0))
    each = tl.div_rn(tl.maximum(tl.max(finite_size(value), axis=1), 1e-10), 448.0)
    code = fp8_code(_quotients(value, each[:, None]), False)
    tl.store(data + row * K + columns, code, mask=fits)
    tl.store(scale + row * tl.cdiv(K, _BLOCK) + block, each, mask=block < tl.cdiv(K, _BLOCK))


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
        code = fp8_code(_quotients(value, each), False)
        tl.store(data + row * K + columns, code, mask=columns < K)
