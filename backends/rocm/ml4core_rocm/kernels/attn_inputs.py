"""The stage ``attn_inputs`` of layers that own an index, with one launch between a key's projection
and its place in the cache: LayerNorm, rope, FP8 and the write, for each of which the composition
has its own.

All else is the backend's own ops, as the composition has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ml4core.api import AttnInputs, IndexerSpec, LayerKV, LayerSpec, StepPlan
from ml4core_rocm.kernels.index_key_write import index_key_write

Weights = Mapping[str, Any]
Ops = Mapping[str, Callable[..., Any]]
Call = Callable[[Weights, StepPlan, LayerKV, Tensor, Tensor | None], AttnInputs]


def attn_inputs(layer: LayerSpec, ops: Ops) -> Call:
    """Bound for a layer that owns an index whose keys no Hadamard matrix turns."""
    spec = layer.indexer
    if spec is None or spec.hadamard:
        raise ValueError(f"layer {layer.index} has no index key that one launch could write")

    def call(
        w: Weights, plan: StepPlan, kv: LayerKV, residual: Tensor, hidden: Tensor | None
    ) -> AttnInputs:
        if kv.index_keys is None:
            raise ValueError(f"layer {layer.index} owns an indexer but was given no index cache")
        if hidden is None:
            hidden = ops["rms_norm"](residual, w["attention_norm"], layer.norm_eps)
        source = hidden
        if layer.q_lora_rank is not None:
            source = ops["gemm"](hidden, w["wq_a"])
            source = ops["rms_norm"](source, w["q_a_norm"], layer.norm_eps)
        q = _query(layer, ops, w, plan, source)
        if layer.owns_kv:
            _write_latent(layer, ops, w, plan, kv, hidden)
        index_source = hidden if spec.query_input == "hidden" else source
        index_q = _index_query(spec, ops, w, plan, index_source)
        index_weights = ops["gemm"](hidden, w["index_weights_proj"], torch.float32)
        index_key_write(
            kv.index_keys,
            plan.slots["index"],
            ops["gemm"](hidden, w["index_wk"], torch.float32),
            w["index_k_norm_weight"],
            w["index_k_norm_bias"],
            spec.norm_eps,
            plan.positions,
            w["inv_freq"] if spec.rope_dim else None,
            spec.rope_interleaved,
        )
        return AttnInputs(q, index_q, index_weights)

    return call


def _query(layer: LayerSpec, ops: Ops, w: Weights, plan: StepPlan, source: Tensor) -> Tensor:
    """The absorbed query [T, N, W]."""
    q = ops["gemm"](source, w["wq" if layer.q_lora_rank is None else "wq_b"])
    nope, rope = q.view(-1, layer.heads, layer.q_dim).split([layer.nope_dim, layer.rope_dim], -1)
    if layer.rope is not None:
        rope = ops["rope"](rope, plan.positions, w["inv_freq"], layer.rope.interleaved, 1.0)
    if layer.ssmax.kind != "none":
        learned = (layer.ssmax, w.get("ssmax_scale"), w.get("ssmax_bias"))
        nope = ops["ssmax"](nope, plan.positions, *learned)
        if layer.rope_dim:
            rope = ops["ssmax"](rope, plan.positions, *learned)
    latent: Tensor = ops["head_gemm"](nope, w["w_uk"])
    return torch.cat([latent, rope], -1) if layer.rope_dim else latent


def _write_latent(
    layer: LayerSpec, ops: Ops, w: Weights, plan: StepPlan, kv: LayerKV, hidden: Tensor
) -> None:
    made = ops["gemm"](hidden, w["wkv_a"])
    latent, rope = made.split([layer.kv_lora_rank, layer.rope_dim], -1)
    latent = ops["rms_norm"](latent, w["kv_a_norm"], layer.norm_eps)
    if layer.rope is not None:
        turned = ops["rope"](
            rope.unsqueeze(1), plan.positions, w["inv_freq"], layer.rope.interleaved, 1.0
        )
        rope = turned.squeeze(1)
    ops["kv_write"](kv.latent, plan.slots["latent"], latent, rope if layer.rope_dim else None)


def _index_query(spec: IndexerSpec, ops: Ops, w: Weights, plan: StepPlan, source: Tensor) -> Tensor:
    """[T, Hi, D] fp32."""
    q: Tensor = ops["gemm"](source, w["index_wq"], torch.float32).view(
        -1, spec.heads, spec.head_dim
    )
    if spec.query_norm:
        q = ops["layer_norm"](q, w["index_q_norm_weight"], w["index_q_norm_bias"], spec.norm_eps)
    if spec.rope_dim:
        # The rotated dims stand first here, last in the main attention.
        head, tail = q.split([spec.rope_dim, spec.head_dim - spec.rope_dim], -1)
        head = ops["rope"](head, plan.positions, w["inv_freq"], spec.rope_interleaved, 1.0)
        q = torch.cat([head, tail], -1)
    if spec.ssmax.kind != "none":
        learned = (spec.ssmax, w.get("index_ssmax_scale"), w.get("index_ssmax_bias"))
        q = ops["ssmax"](q, plan.positions, *learned)
    return q
