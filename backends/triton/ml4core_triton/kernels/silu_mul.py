"""``silu_mul``: the gate of a feed-forward, where it isn't fused into the product before.

Rate model: 6 bytes an element of the result in bf16; 4,096 rows of 16,384 are 403 MB, 95 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.numeric import narrow, rows_of, widen


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) in fp32, by an exponential that can't overflow."""
    small = tl.exp(-tl.abs(x))
    return x * tl.fdiv(tl.where(x < 0, small, 1.0), 1.0 + small)


@triton.jit
def _silu_mul_kernel(x, out, width, x_row, BLOCK: tl.constexpr):
    """Grid (T, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = at < width
    gate = widen(tl.load(x + row * x_row + at, mask=fits, other=0.0))
    up = widen(tl.load(x + row * x_row + width + at, mask=fits, other=0.0))
    tl.store(out + row * width + at, narrow(silu(gate) * up, out.dtype.element_ty), mask=fits)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` [T, I] of [T, 2I], gate first, in its dtype."""
    x = rows_of(gate_up)
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if out.numel():
        _silu_mul_kernel[(rows, triton.cdiv(width, 1024))](x, out, width, x.stride(0), BLOCK=1024)
    return out
