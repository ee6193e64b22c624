"""``rms_norm``, and the norm of a row in registers that fused kernels share.

Rate model: 4 bytes an element of bf16; one row of 6,144 costs a launch (1.6 us in a graph of an
H200), 4,096 rows 101 MB: 24 us there, 13 us at the 8 TB/s of an MI350X.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.numeric import narrow, next_power, rows_of, widen
from ml4core_triton.kernels.target import target_of


@triton.jit
def normed(x, weight, width, eps):
    """x * rsqrt(mean(x^2) + eps) * weight of one row, fp32 [BLOCK], zeros behind ``width``."""
    # A row beyond 2**40 may overflow when squared: it is normed at a scale of 2**-80, a power of
    # two, which rounds nothing.
    huge = tl.max(tl.abs(x), axis=0) > 1099511627776.0
    shrink = tl.where(huge, 8.271806125530277e-25, 1.0)
    small = x * shrink
    mean = tl.sum(small * small, axis=0) / width
    return small * tl.div_rn(1.0, tl.sqrt_rn(mean + eps * (shrink * shrink))) * weight


@triton.jit
def _rms_norm_kernel(x, weight, out, width, x_row, x_step, inner, eps, BLOCK: tl.constexpr):
    """Grid (rows,): row r is x + (r / inner) * x_row + (r % inner) * x_step."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    fits = at < width
    base = (row // inner) * x_row + (row % inner) * x_step
    value = widen(tl.load(x + base + at, mask=fits, other=0.0))
    factor = widen(tl.load(weight + at, mask=fits, other=0.0))
    found = normed(value, factor, width, eps)
    tl.store(out + row * width + at, narrow(found, out.dtype.element_ty), mask=fits)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis ``[..., H]``, in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if x.dim() == 3 and x.stride(-1) == 1:
        outer, inner, width = x.shape
        steps = (x.stride(0), x.stride(1))
    else:
        x = rows_of(x)
        (outer, width), inner = x.shape, 1
        steps = (x.stride(0), 0)
    _rms_norm_kernel[(outer * inner,)](
        x, weight.contiguous(), out, width, *steps, inner, eps,
        BLOCK=next_power(width), num_warps=warps_for(width, x.device),
    )  # fmt: skip
    return out


def warps_for(width: int, device: torch.device) -> int:
    """Warps of a program that holds a row: up to 16 elements a thread, 16 warps at most."""
    return min(16, max(1, next_power(width) // (16 * target_of(device).lanes)))
