"""Routed and shared experts of very few rows, by logits: part of ``latency_layer``.

Each program makes the router's choice anew, which costs less than a launch. A row of an expert is
read for each row of the step that chose it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import MoESpec
from ml4core_cuda.kernels.gemm import RowTiling, row_tiling
from ml4core_cuda.kernels.moe_row import shape_key
from ml4core_cuda.kernels.prefetch import prefetch_rows
from ml4core_cuda.kernels.row_sums import APART, IN_TURN, TOGETHER, block_scales, group_sums
from ml4core_cuda.kernels.short_shapes import experts_fit
from ml4core_cuda.kernels.target import device_name, most_registers
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.numeric import narrow, next_power, widen
from ml4core_triton.kernels.silu_mul import silu
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import BF16, FORMAT_NAMES, FP8_BLOCK, K_TILE, WeightArgs

_BF16, _FP8_BLOCK = tl.constexpr(BF16), tl.constexpr(FP8_BLOCK)
_CODES = tl.constexpr(FP8_BLOCK)
"""The first format that is stored as codes."""
_COLUMNS = tl.constexpr(K_TILE)
_APART, _IN_TURN = tl.constexpr(APART), tl.constexpr(IN_TURN)
_TOGETHER = tl.constexpr(TOGETHER)


@triton.jit
def _chosen(
    logits, E, routed_scale, TOPK: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Experts int32 and weights fp32 [PLACES] of a row's choices by its logits; choice TOPK is
    expert E, the shared one, with weight 1. A row that can't be judged has weights NaN.
    """
    expert, place = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    real = expert < E
    found = tl.load(logits + expert, mask=real, other=0.0)
    # NaN passes no comparison either.
    broken = tl.sum((real & ~(tl.abs(found) < float("inf"))).to(tl.int32), axis=0) > 0
    found = tl.where(broken, 0.0, found)
    # Keys in the order of the logits, then of the experts from the last: one search a choice.
    bits = (found + 0.0).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    left = tl.where(real, (order << 32) | (BLOCK - 1 - expert).to(tl.int64), -(1 << 63))
    experts = tl.zeros([PLACES], tl.int32) + E
    weights = tl.zeros([PLACES], tl.float32)
    top = 0.0
    for one in tl.static_range(TOPK):
        best = tl.max(left, axis=0)
        left = tl.where(left == best, -(1 << 63), left)
        size = (best >> 32).to(tl.int32)
        logit = (size ^ ((size >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if one == 0:
            top = logit
        at = BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        experts = tl.where(place == one, at, experts)
        weights = tl.where(place == one, tl.exp(logit - top), weights)
    if RENORMALIZE:
        total = tl.sum(weights, axis=0)
    else:
        total = tl.sum(tl.where(real, tl.exp(found - top), 0.0), axis=0)
    weights = tl.div_rn(weights, tl.zeros_like(weights) + total) * routed_scale
    weights = tl.where(place == TOPK, 1.0, weights)
    return experts, tl.where(broken, float("nan"), weights)


@triton.jit
def _one_of(values, choice, PLACES: tl.constexpr):
    """The value of a choice."""
    return tl.sum(tl.where(tl.arange(0, PLACES) == choice, values, 0), axis=0)


@triton.jit
def _behind(base, other, SIZE: tl.constexpr):
    """How many elements of SIZE bytes ``other`` lies behind ``base``; both begin at multiples of 16
    bytes.
    """
    return (other.to(tl.int64) - base.to(tl.int64)) // SIZE


@triton.jit
def _weighted_rows(
    x, experts, weights, data, scale, shared, shared_scale, rows, fits, N, K, E, scale_size,
    first, count, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr,
    PLACES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """fp32 [BN]: the sum over choices ``first`` .. of their weight times rows of their expert's
    matrix [N, K] times their row of ``x`` [.., K]: one loop over all, so that what comes next is
    always being read. ``ROWS`` as for ``row_sum``, whose layout this has.
    """
    SIZE: tl.constexpr = 1 if FORMAT >= _CODES else (2 if FORMAT == _BF16 else 4)
    EACH: tl.constexpr = 16 // SIZE
    COUNT: tl.constexpr = BK // EACH
    column, group = tl.arange(0, BK), tl.arange(0, COUNT)
    kept = tl.where(fits, rows, 0)
    line = kept.to(tl.int64)[:, None] * K
    apart, scales_apart = _behind(data, shared, SIZE), _behind(scale, shared_scale, 4)
    turns = tl.cdiv(K, BK)
    acc = tl.zeros([BN, COUNT], tl.float32)
    for turn in tl.range(0, count * turns, num_stages=STAGES):
        choice = first + turn // turns
        k0 = (turn % turns) * BK
        expert = _one_of(experts, choice, PLACES).to(tl.int64)
        weight = _one_of(weights, choice, PLACES)
        offset = tl.multiple_of(tl.where(expert == E, apart, expert * N * K), 16)
        columns = k0 + column
        # What has no weight isn't read: it may hold anything.
        inside = columns < tl.where(weight != 0, K, 0)
        one = widen(tl.load(x + choice * K + columns, mask=inside, other=0.0)) * weight
        where = data + offset + line + columns[None, :]
        value = tl.load(where, mask=inside[None, :], other=0)
        value = widen(value) if FORMAT < _CODES else decoded(value, tl.float32, False)
        found = group_sums(value, one, BN, COUNT, EACH)
        if FORMAT == _FP8_BLOCK:
            own = tl.where(expert == E, scales_apart, expert * scale_size)
            at = k0 // _COLUMNS + group // (_COLUMNS // EACH)
            found = found * block_scales(scale + own, kept, at, K, BN, ROWS, False)
        elif FORMAT >= _CODES:
            found = found * tl.load(scale + tl.where(expert == E, scales_apart, expert))
        acc += found
    return tl.sum(acc, axis=1)


@triton.jit
def _gated_kernel(
    x, logits, data, scale, shared, shared_scale, out, W, K, E, scale_size, routed_scale,
    TOPK: tl.constexpr, COUNT: tl.constexpr, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr,
    PLACES: tl.constexpr, WHOLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(w1 x) * (w3 x) of each choice, out [T, COUNT, W]: grid (tiles of W, COUNT, T).
    ``WHOLE``: W is a multiple of 128, and so of BN.
    """
    SIZE: tl.constexpr = 1 if FORMAT >= _CODES else (2 if FORMAT == _BF16 else 4)
    choice, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    # Rows of w1 and of w3 in turn, so that one loop reads both.
    index = tl.arange(0, 2 * BN)
    row = tl.program_id(0) * BN + index // 2
    rows, fits = row + (index % 2) * W, row < W
    if choice == TOPK:  # the shared expert is known before the router has spoken
        prefetch_rows(shared, rows, fits, K, SIZE, DEPENDENT)
    wait_for_previous(DEPENDENT)
    experts, weights = _chosen(
        logits + token * E, E, routed_scale, TOPK, RENORMALIZE, EXPERTS, PLACES
    )
    ones = tl.where(weights == weights, 1.0, weights)  # the weight itself comes behind w2
    ones = tl.where(weights == 0, 0.0, ones)
    found = _weighted_rows(
        x + (token - choice) * K, experts, ones, data, scale, shared, shared_scale, rows, fits,
        2 * W, K, E, scale_size, choice, 1, 2 * BN, BK, FORMAT, STAGES, PLACES,
        _IN_TURN if WHOLE else _APART,
    )  # fmt: skip
    # Late, as what comes up would take registers that this launch's own programs need.
    let_next_begin(DEPENDENT)
    gate, up = tl.split(tl.reshape(found, (BN, 2)))
    inner = narrow(silu(gate) * up, out.dtype.element_ty)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out + (token * COUNT + choice) * W + column, inner, mask=column < W)


@triton.jit
def _outer_kernel(
    x, logits, data, scale, shared, shared_scale, out, H, K, E, scale_size, routed_scale,
    TOPK: tl.constexpr, COUNT: tl.constexpr, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr,
    PLACES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weighted sum of w2 times x [T, COUNT, K], fp32 [T, H]: grid (tiles of H, T)."""
    SIZE: tl.constexpr = 1 if FORMAT >= _CODES else (2 if FORMAT == _BF16 else 4)
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = rows < H
    let_next_begin(DEPENDENT)
    prefetch_rows(shared, rows, fits, K, SIZE, DEPENDENT)
    wait_for_previous(DEPENDENT)
    experts, weights = _chosen(
        logits + token * E, E, routed_scale, TOPK, RENORMALIZE, EXPERTS, PLACES
    )
    found = _weighted_rows(
        x + token * COUNT * K, experts, weights, data, scale, shared, shared_scale, rows, fits, H,
        K, E, scale_size, 0, COUNT, BN, BK, FORMAT, STAGES, PLACES, _TOGETHER,
    )  # fmt: skip
    tl.store(out + token * H + rows, found, mask=fits)


def expert_rows(
    moe: MoESpec,
    experts: tuple[WeightArgs, WeightArgs],
    shared: tuple[WeightArgs, WeightArgs],
    hidden: Tensor,
    logits: Tensor,
) -> Tensor:
    """The weighted sum of each row's experts and of the shared one, fp32 [T, H]."""
    (w13, w2), (s13, s2) = experts, shared
    rows, units, count = len(hidden), units_of(hidden.device), moe.topk + 1
    out = torch.empty(rows, w2.rows, dtype=torch.float32, device=hidden.device)
    if experts_fit(hidden, w13, w2, count):
        from ml4core_cuda.kernels import short_experts

        short_experts.launch(
            hidden, w13, w2, shared, logits, None, out, count=count, moe=moe, ahead=True
        )
        return out

    def sizes(part: str, one: WeightArgs, columns: int, matrices: int) -> RowTiling:
        default = row_tiling(columns, one.columns, matrices * rows, units)
        if part == "gated":  # two rows a column
            default = replace(default, columns=max(2, default.columns // 2))
        shape = shape_key(FORMAT_NAMES[one.format], part, columns, one.columns, count)
        return sizes_for("moe_row", device_name(hidden.device), shape, default)

    named: dict[str, Any] = {
        "TOPK": moe.topk, "COUNT": count, "RENORMALIZE": moe.renormalize,
        "EXPERTS": next_power(moe.experts), "PLACES": next_power(count), "DEPENDENT": True,
        **dependent(True),
    }  # fmt: skip
    inner = torch.empty(rows, count, w2.columns, dtype=hidden.dtype, device=hidden.device)
    plan = sizes("gated", w13, w2.columns, count)
    _gated_kernel[(triton.cdiv(w2.columns, plan.columns), count, rows)](
        hidden, logits, w13.data, w13.scale, s13.data, s13.scale, inner, w2.columns, w13.columns,
        w13.matrices, w13.scale_size, float(moe.routed_scale),
        BN=plan.columns, BK=plan.block, FORMAT=w13.format, STAGES=plan.stages,
        WHOLE=w2.columns % K_TILE == 0, num_warps=plan.warps,
        maxnreg=most_registers(plan.warps), **named,
    )  # fmt: skip
    plan = sizes("outer", w2, w2.rows, 1)
    _outer_kernel[(triton.cdiv(w2.rows, plan.columns), rows)](
        inner, logits, w2.data, w2.scale, s2.data, s2.scale, out, w2.rows, w2.columns,
        w2.matrices, w2.scale_size, float(moe.routed_scale),
        BN=plan.columns, BK=plan.block, FORMAT=w2.format, STAGES=plan.stages,
        num_warps=plan.warps, maxnreg=most_registers(plan.warps), **named,
    )  # fmt: skip
    return out
