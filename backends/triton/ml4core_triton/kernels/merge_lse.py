"""``merge_lse``: joins attention over disjoint sets of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.numeric import narrow, next_power, widen
from ml4core_triton.kernels.target import units_of

_TILE = 8192
"""Numbers that a program holds: parts times columns."""


@triton.jit
def merge_kernel(
    outs,
    lses,
    out,
    lse,
    parts,
    out_part_stride,
    out_row_stride,
    lse_part_stride,
    lse_row_stride,
    L: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Columns of one head of one token: grid (rows, blocks of columns). All parts are read at once:
    one after the other, each would wait for the memory anew.
    """
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    part = tl.arange(0, BP)
    each = tl.load(
        lses + part * lse_part_stride + row * lse_row_stride, part < parts, other=float("-inf")
    )
    top = tl.max(each, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(each - base)
    total = tl.sum(weight, 0)
    # What an empty part holds may be anything, and 0 * NaN is NaN.
    known = (each != float("-inf"))[:, None] & (column < L)[None, :]
    place = outs + part.to(tl.int64)[:, None] * out_part_stride + row * out_row_stride
    values = tl.load(place + column[None, :], mask=known, other=0.0)
    joined = tl.sum(widen(values) * weight[:, None], 0)
    some = total != 0.0
    joined = joined / tl.where(some, total, 1.0)
    tl.store(out + row * L + column, narrow(joined, out.dtype.element_ty), column < L)
    if tl.program_id(1) == 0:
        whole = base + tl.log(tl.where(some, total, 1.0))
        tl.store(lse + row, tl.where(some, whole, float("-inf")))


def merge(
    outs: Tensor, lses: Tensor, dtype: torch.dtype, *, ahead: bool = False
) -> tuple[Tensor, Tensor]:
    """``outs`` [parts, rows, L] and ``lses`` [parts, rows]: out [rows, L] in ``dtype``, lse [rows].

    Rows and parts may be strided, the last axis of ``outs`` may not. ``ahead``: the launch may
    begin before the end of the one before it.
    """
    parts, rows, latent = outs.shape
    out = torch.empty(rows, latent, dtype=dtype, device=outs.device)
    lse = torch.empty(rows, dtype=torch.float32, device=outs.device)
    if rows:
        held = next_power(parts)
        columns = min(next_power(latent), max(16, _TILE // held))
        # For few rows, smaller ones: all parts are read by one program, which waits for them.
        while columns > 16 and rows * -(-latent // columns) < 2 * units_of(outs.device):
            columns //= 2
        merge_kernel[(rows, -(-latent // columns))](
            outs,
            lses,
            out,
            lse,
            parts,
            outs.stride(0),
            outs.stride(1),
            lses.stride(0),
            lses.stride(1),
            L=latent,
            BC=columns,
            BP=held,
            DEPENDENT=ahead,
            num_warps=4,
            **dependent(ahead),
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
