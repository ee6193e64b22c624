"""A layer's stages as core composes them of this backend's ops: what fused stages are held against,
and what the standard step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ml4core.api import AttnInputs, LayerKV, LayerSpec, Selection, StepPlan
from ml4core_cuda.kernels.attention_stage import sparse_mla_stage
from ml4core_cuda.kernels.attn_inputs import attn_inputs
from ml4core_cuda.kernels.attn_output import attn_output
from ml4core_cuda.kernels.ffn import moe_ffn
from ml4core_cuda.kernels.gemm import gemm
from ml4core_cuda.kernels.head_gemm import head_gemm
from ml4core_cuda.kernels.select_stage import select_stage
from ml4core_cuda.kernels.sparse_mla import sparse_mla
from ml4core_triton.kernels.all_reduce_rms_norm import add_rms_norm
from ml4core_triton.kernels.indexer_write import indexer_write
from ml4core_triton.kernels.kv_write import kv_write
from ml4core_triton.kernels.layer_norm import layer_norm
from ml4core_triton.kernels.rms_norm import rms_norm
from ml4core_triton.kernels.rope import rope
from ml4core_triton.kernels.ssmax import ssmax

Weights = Mapping[str, Any]


def composed_inputs(
    layer: LayerSpec, w: Weights, plan: StepPlan, kv: LayerKV, hidden: Tensor
) -> AttnInputs:
    """``attn_inputs`` of a layer without query LoRA, op by op."""
    at, rows = plan.positions, hidden.shape[0]

    def turned(x: Tensor, interleaved: bool) -> Tensor:
        return rope(x, at, w["inv_freq"], interleaved, 1.0)

    q = gemm(hidden, w["wq"]).view(rows, layer.heads, layer.q_dim)
    q_nope, q_pe = q.split([layer.nope_dim, layer.rope_dim], dim=-1)
    if layer.rope is not None:
        q_pe = turned(q_pe, layer.rope.interleaved)
    if layer.ssmax.kind != "none":
        learned = (w.get("ssmax_scale"), w.get("ssmax_bias"))
        q_nope = ssmax(q_nope, at, layer.ssmax, *learned)
        if layer.rope_dim:
            q_pe = ssmax(q_pe, at, layer.ssmax, *learned)
    if layer.owns_kv:
        latent, k_pe = gemm(hidden, w["wkv_a"]).split([layer.kv_lora_rank, layer.rope_dim], -1)
        latent = rms_norm(latent, w["kv_a_norm"], layer.norm_eps)
        if layer.rope is not None:
            k_pe = turned(k_pe.unsqueeze(1), layer.rope.interleaved).squeeze(1)
        kv_write(kv.latent, plan.slots["latent"], latent, k_pe if layer.rope_dim else None)
    index_q = index_weights = None
    if (spec := layer.indexer) is not None and kv.index_keys is not None:
        index_q = gemm(hidden, w["index_wq"], torch.float32).view(rows, spec.heads, spec.head_dim)
        index_q = layer_norm(
            index_q, w["index_q_norm_weight"], w["index_q_norm_bias"], spec.norm_eps
        )
        key = gemm(hidden, w["index_wk"], torch.float32)
        key = layer_norm(key, w["index_k_norm_weight"], w["index_k_norm_bias"], spec.norm_eps)
        index_weights = gemm(hidden, w["index_weights_proj"], torch.float32)
        if spec.rope_dim:
            first = [spec.rope_dim, spec.head_dim - spec.rope_dim]
            pieces = [x.split(first, -1) for x in (index_q, key.unsqueeze(1))]
            index_q, key = (
                torch.cat([turned(head, spec.rope_interleaved), tail], -1) for head, tail in pieces
            )
            key = key.squeeze(1)
        if spec.ssmax.kind != "none":
            index_q = ssmax(index_q, at, spec.ssmax, w.get("index_ssmax_scale"))
        indexer_write(kv.index_keys, plan.slots["index"], key)
    q_latent = head_gemm(q_nope, w["w_uk"])
    absorbed = torch.cat([q_latent, q_pe], -1) if layer.rope_dim else q_latent
    return AttnInputs(absorbed, index_q, index_weights)


def composed_output(
    layer: LayerSpec, w: Weights, out: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor | None]:
    """``attn_output`` of one rank, op by op."""
    x = gemm(head_gemm(out, w["w_uv"]).flatten(1), w["wo"])
    return add_rms_norm(x, residual, w["ffn_norm"], layer.norm_eps)


def composed_layer(layer: LayerSpec) -> Callable[..., Any]:
    """The ``decoder_layer`` stage of one rank, its attention op by op."""
    assert layer.moe is not None
    feed = moe_ffn(layer.moe, layer.norm_eps, None)
    select = select_stage(layer) if layer.owns_index else None

    def call(
        w: Weights, plan: StepPlan, kv: LayerKV, residual: Tensor, hidden: Tensor,
        selection: Selection | None, next_norm: Tensor | None,
    ) -> Any:  # fmt: skip
        made = composed_inputs(layer, w, plan, kv, hidden)
        if select is not None:
            selection = select(plan, kv, made.index_q, made.index_weights)
        assert selection is not None
        out, _ = sparse_mla(made.q, kv.latent, selection.slots, selection.lens, layer.softmax_scale)
        state = composed_output(layer, w, out, residual)
        assert state[1] is not None
        return *feed(w, state[0], state[1], next_norm), selection

    return call


def standard_layer(layer: LayerSpec) -> Callable[..., Any]:
    """The same of the stages that are bound for very few rows, without the latency-specialised."""
    assert layer.moe is not None
    inputs, attend = attn_inputs(layer, ahead=True), sparse_mla_stage(layer)
    select = select_stage(layer, ahead=True) if layer.owns_index else None
    project, feed = attn_output(layer), moe_ffn(layer.moe, layer.norm_eps, None)

    def call(
        w: Weights, plan: StepPlan, kv: LayerKV, residual: Tensor, hidden: Tensor,
        selection: Selection | None, next_norm: Tensor | None,
    ) -> Any:  # fmt: skip
        made = inputs(w, plan, kv, residual, hidden)
        if select is not None:
            selection = select(plan, kv, made.index_q, made.index_weights)
        out, _ = attend(plan, kv, made.q, selection)
        return *feed(w, *project(w, out, residual), next_norm), selection

    return call
