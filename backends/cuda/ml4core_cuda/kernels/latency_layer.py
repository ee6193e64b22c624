"""One MoE layer's decode step for very few rows, in few launches that follow each other closely.

Nine launches for a layer that reuses a selection, twelve and some of top-k for one that makes it;
each may come up while the one before still runs, and waits for its results only. What the standard
path launches apart is here part of a neighbour: parts of attention are joined where W_UV meets
them, the norm is made anew by each program of the router, and each program of the experts makes the
router's choice. Nothing waits for another program of its own launch.

The sum of the rows' bytes is the floor; a row of an expert is read for each row that chose it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import LayerKV, LayerSpec, Selection, StepPlan, Weight
from ml4core_cuda.kernels.attn_inputs import attn_inputs
from ml4core_cuda.kernels.ffn import alike, moe_ffn, pair
from ml4core_cuda.kernels.gemm import row_tiling
from ml4core_cuda.kernels.latency_experts import expert_rows
from ml4core_cuda.kernels.prefetch import prefetch_rows
from ml4core_cuda.kernels.row_sums import TOGETHER, row_sum
from ml4core_cuda.kernels.select_stage import select_stage
from ml4core_cuda.kernels.sparse_mla import attended_parts
from ml4core_triton.kernels.all_reduce_rms_norm import add_rms_norm
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.numeric import narrow, next_power, widen
from ml4core_triton.kernels.rms_norm import normed, warps_for
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import BF16, FP8_BLOCK, weight_args, whole_scale

Weights = Mapping[str, Any]
Call = Callable[..., tuple[Tensor, Tensor | None, Selection | None]]
_TOGETHER, _BF16 = tl.constexpr(TOGETHER), tl.constexpr(BF16)
_CODES = tl.constexpr(FP8_BLOCK)
_TILE = 8192
"""Numbers of joined parts that a program holds at a time."""


@triton.jit
def _values_kernel(
    outs, lses, w_uv, values, parts, out_part, lse_part,
    N: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """W_UV times the joined parts of a head: grid (T N, tiles of V)."""
    SIZE: tl.constexpr = w_uv.dtype.element_ty.primitive_bitwidth // 8
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    let_next_begin(DEPENDENT)
    prefetch_rows(w_uv + (row % N) * V * L, v, v < V, L, SIZE, DEPENDENT)
    wait_for_previous(DEPENDENT)
    part = tl.arange(0, BP)
    each = tl.load(lses + part * lse_part + row, part < parts, other=float("-inf"))
    top = tl.max(each, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(each - base)
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    known = (each != float("-inf"))[:, None]
    found = tl.zeros((BV,), tl.float32)
    for start in range(0, L, BC):
        column = start + tl.arange(0, BC)
        place = outs + part.to(tl.int64)[:, None] * out_part + row * L + column[None, :]
        held = tl.load(place, mask=known & (column < L)[None, :], other=0.0)
        joined = tl.sum(widen(held) * weight[:, None], 0)
        matrix = w_uv + ((row % N) * V + v)[:, None] * L + column[None, :]
        fits = (v < V)[:, None] & (column < L)[None, :]
        found += tl.sum(widen(tl.load(matrix, mask=fits, other=0.0)) * joined[None, :], 1)
    tl.store(values + row * V + v, narrow(found, values.dtype.element_ty), v < V)


@triton.jit
def _rows_kernel(
    x, data, scale, row_scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A matrix [N, K] times each row, fp32: grid (tiles of N, T)."""
    SIZE: tl.constexpr = 1 if FORMAT >= _CODES else (2 if FORMAT == _BF16 else 4)
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = rows < N
    let_next_begin(DEPENDENT)
    prefetch_rows(data, rows, fits, K, SIZE, DEPENDENT)
    wait_for_previous(DEPENDENT)
    found = row_sum(
        x + token * K, data, scale, rows, fits, K, BN, BK, FORMAT, STAGES, _TOGETHER, EVEN
    )
    found = found * whole_scale(scale, row_scale, rows, fits, FORMAT, BN)
    tl.store(out + token * N + rows, found, mask=fits)


@triton.jit
def _logits_kernel(
    made, residual, residual_row, norm, gate, summed, hidden, logits, H, E, eps,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """residual + made, its norm, and one expert's logit of it: grid (E, T)."""
    let_next_begin(DEPENDENT)
    expert, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    fits = at < H
    # What no launch writes is read while the one before runs.
    weights = tl.load(gate + expert.to(tl.int64) * H + at, mask=fits, other=0.0)
    factor = widen(tl.load(norm + at, mask=fits, other=0.0))
    wait_for_previous(DEPENDENT)
    total = tl.load(made + token * H + at, mask=fits, other=0.0)
    total += widen(tl.load(residual + token * residual_row + at, mask=fits, other=0.0))
    stored = narrow(total, summed.dtype.element_ty)
    x = narrow(normed(widen(stored), factor, H, eps), hidden.dtype.element_ty)
    if expert == 0:
        tl.store(summed + token * H + at, stored, mask=fits)
        tl.store(hidden + token * H + at, x, mask=fits)
    tl.store(logits + token * E + expert, tl.sum(widen(x) * weights, 0))


def latency_layer(layer: LayerSpec) -> Call:
    """The ``decoder_layer`` stage's call, for an MoE layer that attends to a selection."""
    moe = layer.moe
    if moe is None or layer.topk_source is None:
        raise ValueError(f"layer {layer.index} has no experts or no selection")
    inputs = attn_inputs(layer, ahead=True)
    select = select_stage(layer, ahead=True) if layer.owns_index else None
    apart = moe_ffn(moe, layer.norm_eps, None)

    def call(
        w: Weights, plan: StepPlan, kv: LayerKV, residual: Tensor, hidden: Tensor | None,
        selection: Selection | None, next_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Selection | None]:  # fmt: skip
        made = inputs(w, plan, kv, residual, hidden)
        if select is not None:
            selection = select(plan, kv, made.index_q, made.index_weights)
        assert selection is not None, "a sharer is given what it shares"
        parts, lses = attended_parts(
            made.q, kv.latent, selection.slots, selection.lens, layer.softmax_scale, ahead=True
        )
        out = attn_rows(w, layer, parts, lses)
        residual, hidden, logits = routed(w, layer, out, residual)
        experts, shared = pair(w, "experts"), pair(w, "shared") if moe.shared_width else None
        if shared is None or not alike(experts, shared):
            summed, normed_rows = apart(w, residual, hidden, next_norm)
            return summed, normed_rows, selection
        found = expert_rows(moe, experts, shared, hidden, logits)
        return *add_rms_norm(found, residual, next_norm, layer.norm_eps, ahead=True), selection

    return call


def attn_rows(w: Weights, layer: LayerSpec, parts: Tensor, lses: Tensor) -> Tensor:
    """Attention's output before its residual, fp32 [T, H], of parts [S, T N, L]."""
    count, rows, latent = parts.shape
    heads, width = layer.heads, layer.v_dim
    w_uv: Tensor = w["w_uv"].data.contiguous()
    values = torch.empty(rows // heads, heads * width, dtype=w_uv.dtype, device=parts.device)
    held = next_power(count)
    _values_kernel[(rows, triton.cdiv(width, 32))](
        parts, lses, w_uv, values, count, parts.stride(0), lses.stride(0),
        N=heads, L=latent, V=width, BV=32, BP=held,
        BC=min(next_power(latent), 256, max(16, _TILE // held)), DEPENDENT=True, num_warps=4,
        **dependent(True),
    )  # fmt: skip
    wo: Weight = w["wo"]
    matrix = weight_args(wo)
    plan = row_tiling(matrix.rows, matrix.columns, 1, units_of(parts.device))
    out = torch.empty(len(values), matrix.rows, dtype=torch.float32, device=parts.device)
    _rows_kernel[(triton.cdiv(matrix.rows, plan.columns), len(values))](
        values, matrix.data, matrix.scale, matrix.row_scale, out, matrix.rows, matrix.columns,
        BN=plan.columns, BK=plan.block, FORMAT=matrix.format, STAGES=plan.stages,
        EVEN=matrix.columns % plan.block == 0, DEPENDENT=True, num_warps=plan.warps,
        **dependent(True),
    )  # fmt: skip
    return out


def routed(
    w: Weights, layer: LayerSpec, out: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual with attention's output, its norm, and the router's logits fp32 [T, E]."""
    gate: Tensor = w["gate"]
    (rows, width), experts = out.shape, gate.shape[0]
    if residual.stride(-1) != 1:
        residual = residual.contiguous()
    summed = torch.empty(rows, width, dtype=residual.dtype, device=out.device)
    hidden = torch.empty_like(summed)
    logits = torch.empty(rows, experts, dtype=torch.float32, device=out.device)
    norm: Tensor = w["ffn_norm"]
    # Both are read before the wait: a copy would not have been made by then.
    ahead = norm.is_contiguous() and gate.is_contiguous()
    _logits_kernel[(experts, rows)](
        out, residual, residual.stride(0), norm.contiguous(), gate.contiguous(), summed, hidden,
        logits, width, experts, layer.norm_eps,
        BLOCK=next_power(width), DEPENDENT=ahead, num_warps=warps_for(width, out.device),
        **dependent(ahead),
    )  # fmt: skip
    return summed, hidden, logits
