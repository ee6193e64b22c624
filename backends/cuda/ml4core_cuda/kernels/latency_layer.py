"""One MoE layer's decode step for very few rows, in few launches that follow each other closely.

Ten launches for a layer that reuses a selection, thirteen and some of top-k for one that makes it;
each may come up while the one before still runs, and waits for its results only. What the standard
path launches apart is here part of a neighbour: the norm is made anew by each program of the
router, and each program of the experts makes the router's choice. Nothing waits for another program
of its own launch.

The sum of the rows' bytes is the floor; a row of an expert is read for each row that chose it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import LayerKV, LayerSpec, Selection, StepPlan
from ml4core_cuda.kernels.attn_inputs import attn_inputs
from ml4core_cuda.kernels.attn_output import attn_rows
from ml4core_cuda.kernels.ffn import alike, moe_ffn, pair
from ml4core_cuda.kernels.latency_experts import expert_rows
from ml4core_cuda.kernels.select_stage import select_stage
from ml4core_cuda.kernels.sparse_mla import attended_parts
from ml4core_triton.kernels.all_reduce_rms_norm import add_rms_norm
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.merge_lse import merge
from ml4core_triton.kernels.numeric import narrow, next_power, widen
from ml4core_triton.kernels.rms_norm import normed, warps_for

Weights = Mapping[str, Any]
Call = Callable[..., tuple[Tensor, Tensor | None, Selection | None]]


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
        if len(parts) > 1:
            joined, _ = merge(parts, lses, torch.float32, ahead=True)
        else:
            joined = parts[0]
        out = attn_rows(w, layer, joined)
        residual, hidden, logits = routed(w, layer, out, residual)
        experts, shared = pair(w, "experts"), pair(w, "shared") if moe.shared_width else None
        if shared is None or not alike(experts, shared):
            summed, normed_rows = apart(w, residual, hidden, next_norm)
            return summed, normed_rows, selection
        found = expert_rows(moe, experts, shared, hidden, logits)
        return *add_rms_norm(found, residual, next_norm, layer.norm_eps, ahead=True), selection

    return call


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
