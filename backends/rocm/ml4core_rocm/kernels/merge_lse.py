"""``merge_lse``: joins attention over disjoint sets of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_rocm.kernels.numeric import narrow, next_power


@triton.jit
def merge_kernel(
    outs,
    lses,
    out,
    lse,
    rows,
    parts,
    out_part_stride,
    out_row_stride,
    lse_part_stride,
    lse_row_stride,
    L: tl.constexpr,
    BL: tl.constexpr,
    BP: tl.constexpr,
):
    """A program joins one head of one token: row ``program_id`` of ``rows``."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BP)
    each = tl.load(
        lses + part * lse_part_stride + row * lse_row_stride, part < parts, other=float("-inf")
    )
    top = tl.max(each, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(each - base), 0)
    column = tl.arange(0, BL)
    joined = tl.zeros((BL,), tl.float32)
    for p in range(parts):
        own = tl.load(lses + p * lse_part_stride + row * lse_row_stride)
        # What an empty part holds may be anything, and 0 * NaN is NaN.
        spread = own + tl.zeros((BL,), tl.float32)
        mask = (column < L) & (spread != float("-inf"))
        values = tl.load(
            outs + p * out_part_stride + row * out_row_stride + column, mask=mask, other=0.0
        )
        joined += tl.exp(own - base) * values.to(tl.float32)
    some = total != 0.0
    joined = joined / tl.where(some, total, 1.0)
    tl.store(out + row * L + column, narrow(joined, out.dtype.element_ty), column < L)
    tl.store(lse + row, tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("-inf")))


def merge(outs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``outs`` [parts, rows, L] and ``lses`` [parts, rows]: out [rows, L] in ``dtype``, lse [rows].

    Rows and parts may be strided, the last axis of ``outs`` may not.
    """
    parts, rows, latent = outs.shape
    out = torch.empty(rows, latent, dtype=dtype, device=outs.device)
    lse = torch.empty(rows, dtype=torch.float32, device=outs.device)
    if rows:
        merge_kernel[(rows,)](
            outs,
            lses,
            out,
            lse,
            rows,
            parts,
            outs.stride(0),
            outs.stride(1),
            lses.stride(0),
            lses.stride(1),
            L=latent,
            BL=next_power(latent),
            BP=next_power(parts),
            num_warps=4,
        )
    return out, lse


def merge_lse(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Joins ``outs`` [parts, T, N, L] with ``lses`` fp32 [parts, T, N] over disjoint sets of keys.

    A part with lse -inf has no weight, whatever its out holds.
    """
    parts, rows, heads, latent = outs.shape
    flat = outs.reshape(parts, rows * heads, latent)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    out, lse = merge(flat, lses.reshape(parts, rows * heads), outs.dtype)
    return out.view(rows, heads, latent), lse.view(rows, heads)
