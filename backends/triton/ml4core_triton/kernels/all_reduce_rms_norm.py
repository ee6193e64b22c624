"""``all_reduce_rms_norm``: a block's output into the residual, and the norm before the next block.

Rate model: 8 bytes an element of bf16 (two read, two written), once: 4,096 rows of 6,144 are
201 MB, 47 us; one row costs a launch instead of two. With several ranks the sum comes from the
collectives first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import Collectives
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.numeric import narrow, next_power, rows_of, widen
from ml4core_triton.kernels.rms_norm import normed, warps_for


@triton.jit
def _add_norm_kernel(
    x, residual, weight, summed, hidden, width, x_row, residual_row, eps,
    NORM: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (T,)."""
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    fits = at < width
    total = widen(tl.load(residual + row * residual_row + at, mask=fits, other=0.0))
    total += widen(tl.load(x + row * x_row + at, mask=fits, other=0.0))
    stored = narrow(total, summed.dtype.element_ty)
    tl.store(summed + row * width + at, stored, mask=fits)
    if NORM:
        factor = widen(tl.load(weight + at, mask=fits, other=0.0))
        # What is normed is the residual as it is kept, rounded.
        found = normed(widen(stored), factor, width, eps)
        tl.store(hidden + row * width + at, narrow(found, hidden.dtype.element_ty), mask=fits)


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, collectives: Collectives
) -> tuple[Tensor, Tensor | None]:
    """The residual [T, H] plus the sum of ``x`` over ranks, and its norm if given a weight."""
    if collectives.world_size > 1:
        x = collectives.all_reduce(x)
    return add_rms_norm(x, residual, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, ahead: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same of one rank. ``ahead``: the launch may begin before the end of the one before."""
    x, residual = rows_of(x), rows_of(residual)
    rows, width = residual.shape
    summed = torch.empty(rows, width, dtype=residual.dtype, device=residual.device)
    hidden = None if weight is None else torch.empty_like(summed)
    if rows:
        _add_norm_kernel[(rows,)](
            x, residual, summed if weight is None else weight.contiguous(), summed,
            summed if hidden is None else hidden, width, x.stride(0), residual.stride(0), eps,
            NORM=weight is not None, BLOCK=next_power(width), DEPENDENT=ahead,
            num_warps=warps_for(width, residual.device), **dependent(ahead),
        )  # fmt: skip
    return summed, hidden
