"""Sums that end a product: of its parts, and of a row's experts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.numeric import narrow


@triton.jit
def _add_parts_kernel(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = parts[0, i] + parts[1, i] + .., in that order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    fits = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * size + at, mask=fits, other=0.0)
    tl.store(out + at, narrow(total, out.dtype.element_ty), mask=fits)


def add_parts(parts: Tensor, out: Tensor) -> None:
    """Fills ``out`` with the sum of fp32 ``parts`` [P, ..] of its shape, both dense."""
    size = out.numel()
    _add_parts_kernel[(triton.cdiv(size, 1024),)](
        parts, out, size, PARTS=parts.shape[0], BLOCK=1024
    )


@triton.jit
def _combine_kernel(
    outer, weights, ids, out, H, first_expert, E, TOPK: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums of choices in their order, fp32, cast once: grid (T, blocks of H)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOPK):
        one = row * TOPK + choice
        weight = tl.load(weights + one)
        expert = tl.load(ids + one) - first_expert
        # What adds nothing was never written.
        used = at < tl.where((expert >= 0) & (expert < E) & (weight != 0), H, 0)
        value = tl.load(outer + one * H + at, mask=used, other=0.0)
        total += tl.where(used, value * weight, 0.0)
    tl.store(out + row * H + at, narrow(total, out.dtype.element_ty), mask=at < H)


def combine(
    each: Tensor, weights: Tensor, ids: Tensor, out: Tensor, first_expert: int, experts: int
) -> None:
    """Fills ``out`` [T, H] with the weighted sums of choices, fp32 [T topk, H], of this rank's
    ``experts``; what others compute adds nothing.
    """
    rows, topk = ids.shape
    width = out.shape[1]
    _combine_kernel[(rows, triton.cdiv(width, 1024))](
        each, weights, ids, out, width, first_expert, experts, TOPK=topk, BLOCK=1024
    )
