"""The ``ffn`` stage of an MoE layer on one rank: router, routed and shared experts, residual, norm.

The shared expert is one choice more of each row, with weight 1. One row takes five launches (two of
the router, two of the experts, one of residual and norm); more rows six; up to four rows four where
``short_experts`` choose by logits. Rate model of one row at a rank of eight (experts of 768 in
``fp8_block``): five experts of 14.2 MB and a router of 3.1 MB, 74 MB in all, 17.4 us at 4.25 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import MoESpec, Weight
from ml4core_cuda.kernels.gemm import gemm
from ml4core_cuda.kernels.moe_experts import each_choice, moe_experts, taken_apart
from ml4core_cuda.kernels.moe_row import rows_apart
from ml4core_cuda.kernels.short_shapes import experts_fit
from ml4core_triton.kernels.all_reduce_rms_norm import add_rms_norm
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.numeric import narrow, next_power, widen
from ml4core_triton.kernels.rms_norm import normed, warps_for
from ml4core_triton.kernels.router import route
from ml4core_triton.kernels.silu_mul import silu_mul
from ml4core_triton.kernels.weights import WeightArgs, weight_args

_SHORT_ROWS = 4
"""Rows up to which ``short_experts`` are faster, though rows don't share what they read: at 4 rows
of one of eight ranks a layer takes 117 us with them, and 177 us without.
"""

Weights = Mapping[str, Tensor | Weight]
Pair = tuple[WeightArgs, WeightArgs]


@triton.jit
def _logits_kernel(x, gate, logits, H, E, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """An expert's logit of a row: grid (E, T)."""
    let_next_begin(DEPENDENT)
    expert, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    # What no launch writes is read while the one before runs.
    weights = tl.load(gate + expert.to(tl.int64) * H + at, mask=at < H, other=0.0)
    wait_for_previous(DEPENDENT)
    one = widen(tl.load(x + token * H + at, mask=at < H, other=0.0))
    tl.store(logits + token * E + expert, tl.sum(one * weights, 0))


@triton.jit
def _combine_norm_kernel(
    each, weights, residual, weight, summed, hidden, H, residual_row, eps,
    COUNT: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual + the weighted sum of a row's choices in their order, and its norm: grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    fits = at < H
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(COUNT):
        factor = tl.load(weights + row * COUNT + choice)
        used = at < tl.where(factor != 0, H, 0)  # what has no weight was never written
        value = tl.load(each + (row * COUNT + choice) * H + at, mask=used, other=0.0)
        total += tl.where(used, value * factor, 0.0)
    # The block's output is a tensor of the model's dtype in the composition; here it isn't rounded.
    total += widen(tl.load(residual + row * residual_row + at, mask=fits, other=0.0))
    stored = narrow(total, summed.dtype.element_ty)
    tl.store(summed + row * H + at, stored, mask=fits)
    if NORM:
        factor = widen(tl.load(weight + at, mask=fits, other=0.0))
        found = normed(widen(stored), factor, H, eps)
        tl.store(hidden + row * H + at, narrow(found, hidden.dtype.element_ty), mask=fits)


def moe_ffn(
    moe: MoESpec, eps: float, act: str | None
) -> Callable[[Weights, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """The stage's call for a layer of that spec."""

    def call(
        w: Weights, residual: Tensor, hidden: Tensor, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        gate = w["gate"]
        assert isinstance(gate, Tensor)
        routed = pair(w, "experts")
        shared = pair(w, "shared") if moe.shared_width else None
        if shared is None or not alike(routed, shared) or not hidden.shape[0]:
            return _apart(w, moe, eps, act, residual, hidden, next_norm)
        apart = taken_apart(hidden, routed[0], act)
        hidden = hidden.contiguous()
        count = moe.topk + 1
        few = act is None and hidden.shape[0] <= _SHORT_ROWS
        if few and experts_fit(hidden, *routed, count):
            from ml4core_cuda.kernels import short_experts

            logits = row_logits(hidden, gate)
            out = torch.empty_like(hidden)
            short_experts.launch(
                hidden, *routed, shared, logits, None, out, count=count, moe=moe, ahead=True
            )
            return add_rms_norm(out, residual, next_norm, eps, ahead=True)
        weights, ids = route(
            hidden, gate, moe.topk, moe.renormalize, moe.routed_scale, shared=True, ahead=apart
        )
        if apart:  # its launches follow each other closely
            out = torch.empty_like(hidden)
            rows_apart(hidden, *routed, shared, weights, ids, 0, out, ahead=True)
            return add_rms_norm(out, residual, next_norm, eps, ahead=True)
        each = each_choice(hidden, *routed, shared, weights, ids, 0, act)
        return _combined(each, weights, residual, next_norm, eps)

    return call


def row_logits(x: Tensor, gate: Tensor) -> Tensor:
    """Router logits fp32 [T, E] of few rows ``x`` [T, H], dense, by ``gate`` fp32 [E, H]."""
    experts, width = gate.shape
    logits = torch.empty(len(x), experts, dtype=torch.float32, device=x.device)
    ahead = gate.is_contiguous()  # it is read before the wait: a copy would not have been made
    _logits_kernel[(experts, len(x))](
        x, gate.contiguous(), logits, width, experts, BLOCK=next_power(width), DEPENDENT=ahead,
        num_warps=warps_for(width, x.device), **dependent(ahead),
    )  # fmt: skip
    return logits


def pair(w: Weights, name: str) -> Pair:
    w13, w2 = w[f"{name}_w13"], w[f"{name}_w2"]
    assert isinstance(w13, Weight)
    assert isinstance(w2, Weight)
    return weight_args(w13), weight_args(w2)


def alike(routed: Pair, shared: Pair) -> bool:
    """Whether the shared expert can stand as one more beside the routed ones."""
    return all(
        (a.format, a.rows, a.columns) == (b.format, b.rows, b.columns)
        for a, b in zip(routed, shared, strict=True)
    )


def _combined(
    each: Tensor, weights: Tensor, residual: Tensor, next_norm: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    rows, width = residual.shape
    if residual.stride(-1) != 1:
        residual = residual.contiguous()
    summed = torch.empty(rows, width, dtype=residual.dtype, device=residual.device)
    hidden = None if next_norm is None else torch.empty_like(summed)
    _combine_norm_kernel[(rows,)](
        each, weights, residual, summed if next_norm is None else next_norm.contiguous(), summed,
        summed if hidden is None else hidden, width, residual.stride(0), eps,
        COUNT=weights.shape[1], NORM=hidden is not None, BLOCK=next_power(width),
        num_warps=warps_for(width, residual.device),
    )  # fmt: skip
    return summed, hidden


def _apart(
    w: Weights,
    moe: MoESpec,
    eps: float,
    act: str | None,
    residual: Tensor,
    hidden: Tensor,
    next_norm: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The same where the shared expert has another format or width, or there is none."""
    gate, w13, w2 = w["gate"], w["experts_w13"], w["experts_w2"]
    assert isinstance(gate, Tensor)
    assert isinstance(w13, Weight)
    assert isinstance(w2, Weight)
    weights, ids = route(hidden, gate, moe.topk, moe.renormalize, moe.routed_scale, shared=False)
    weights = torch.where((weights == 0).all(-1, keepdim=True), torch.nan, weights)
    out = moe_experts(hidden, w13, w2, weights, ids, act=act)
    if moe.shared_width:
        first, second = w["shared_w13"], w["shared_w2"]
        assert isinstance(first, Weight)
        assert isinstance(second, Weight)
        more = gemm(silu_mul(gemm(hidden, first, act=act)), second, act=act)
        out = (out.float() + more.float()).to(hidden.dtype)
    return add_rms_norm(out, residual, next_norm, eps)
