"""The ``attn_inputs`` stage for a few rows, in two launches: all projections, then all the rest.

A third comes before them where the stage has to norm its input, as in the first layer. Numbers stay
fp32 between the two, where the composition rounds them to the model's dtype after each op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ml4core.api import AttnInputs, LayerKV, LayerSpec, SSMaxSpec, StepPlan, Weight
from ml4core_cuda.kernels.attn_finish import finish_kernel
from ml4core_cuda.kernels.attn_products import FUSED, projected, separately
from ml4core_triton.kernels.chaining import dependent
from ml4core_triton.kernels.keys import index_keys
from ml4core_triton.kernels.latents import latent_rows
from ml4core_triton.kernels.numeric import next_power
from ml4core_triton.kernels.rms_norm import rms_norm
from ml4core_triton.kernels.ssmax import KINDS
from ml4core_triton.kernels.weights import WeightArgs, weight_args

MAX_ROWS = 16
"""Rows of a step at most: each job of the second launch takes one."""

_HEADS = 8
"""Heads of an index query a program."""

Weights = Mapping[str, Any]
Call = Callable[[Weights, StepPlan, LayerKV, Tensor, Tensor | None], AttnInputs]


def attn_inputs(layer: LayerSpec, *, ahead: bool = False) -> Call:
    """The stage's call for a layer without query LoRA. ``ahead``: its launches may begin before the
    end of those before them.
    """

    def call(
        w: Weights, plan: StepPlan, kv: LayerKV, residual: Tensor, hidden: Tensor | None
    ) -> AttnInputs:
        # What norms doesn't wait for its forerunner, so that nothing may run ahead of it.
        chained = ahead and hidden is not None
        if hidden is None:
            hidden = rms_norm(residual, w["attention_norm"], layer.norm_eps)
        if hidden.stride(-1) != 1:
            hidden = hidden.contiguous()
        made = _projected(layer, w, hidden, chained)
        return _finished(layer, w, plan, kv, made, hidden, ahead)

    return call


def _projected(layer: LayerSpec, w: Weights, hidden: Tensor, ahead: bool) -> Tensor:
    names = ["wq", "wkv_a" if layer.owns_kv else ""]
    names += ["index_wq", "index_wk"] if layer.indexer else ["", ""]
    given = [w[name] if name else None for name in names]
    last: Weight | None = w["index_weights_proj"] if layer.indexer else None
    args: list[WeightArgs | None] = [None if one is None else weight_args(one) for one in given]
    fits = all(one is None or one.format in FUSED for one in args)
    if fits and (last is None or last.format == "fp32"):
        return projected(hidden, args, None if last is None else weight_args(last), ahead)
    return separately(hidden, [one for one in (*given, last) if one is not None])


def _ssmax(spec: SSMaxSpec, scale: Tensor | None) -> tuple[float, int, int, float]:
    """beta, origin, limit and the factor of the whole."""
    limit = (1 << 62) if spec.n_limit is None else spec.n_limit
    whole = float(spec.scale) if spec.kind == "log" and scale is None else 1.0
    return float(spec.beta), spec.original_max_position, limit, whole


def _finished(
    layer: LayerSpec, w: Weights, plan: StepPlan, kv: LayerKV, made: Tensor, hidden: Tensor,
    ahead: bool,
) -> AttnInputs:  # fmt: skip
    spec, device, rows = layer.indexer, hidden.device, hidden.shape[0]
    if spec is not None and kv.index_keys is None:
        raise ValueError(f"layer {layer.index} owns an indexer but was given no index cache")
    heads, latent = layer.heads, layer.kv_lora_rank
    q = torch.empty(rows, heads, layer.absorbed_dim, dtype=hidden.dtype, device=device)
    index_q = index_weights = None
    if spec is not None:
        index_q = torch.empty(rows, spec.heads, spec.head_dim, dtype=torch.float32, device=device)
        index_weights = torch.empty(rows, spec.heads, dtype=torch.float32, device=device)
    cache = latent_rows(kv.latent)
    keys = None if kv.index_keys is None else index_keys(kv.index_keys)
    tile = next(size for size in (64, 32, 16, 8, 4, 2, 1) if latent % size == 0)
    jobs = heads * (latent // tile) + layer.owns_kv
    if spec is not None:
        jobs += 1 + -(-spec.heads // _HEADS)
    learned, bias = w.get("ssmax_scale"), w.get("ssmax_bias")
    index_learned, index_bias = w.get("index_ssmax_scale"), w.get("index_ssmax_bias")
    index_ssmax = spec.ssmax if spec else SSMaxSpec()

    def there(value: Tensor | None) -> Tensor:
        return made if value is None else value.contiguous()

    q_norm, q_bias = w.get("index_q_norm_weight"), w.get("index_q_norm_bias")
    w_uk = w["w_uk"].data.contiguous()
    finish_kernel[(jobs, rows)](
        made, made.stride(0), made.stride(1), plan.positions, there(w.get("inv_freq")), q, w_uk,
        there(learned), there(bias), *_ssmax(layer.ssmax, learned), there(w.get("kv_a_norm")),
        layer.norm_eps,
        cache.rows, cache.scale, plan.slots["latent"], kv.latent.blocks * kv.latent.block_size,
        cache.page_stride, cache.row_stride,
        made if keys is None else keys.pages, plan.slots.get("index", plan.positions),
        0 if kv.index_keys is None else kv.index_keys.blocks * kv.index_keys.block_size,
        0 if keys is None else keys.page_stride,
        there(q_norm), there(q_bias), there(w.get("index_k_norm_weight")),
        there(w.get("index_k_norm_bias")), spec.norm_eps if spec else 0.0, there(index_learned),
        there(index_bias), *_ssmax(index_ssmax, index_learned),
        made if index_q is None else index_q, made if index_weights is None else index_weights,
        N=heads, P=layer.nope_dim, BP=next_power(layer.nope_dim), R=layer.rope_dim,
        BR=max(1, next_power(layer.rope_dim)), L=latent, BL=max(128, next_power(cache.latent)),
        HL=tile, ROPE=layer.rope is not None and layer.rope_dim > 0,
        INTERLEAVED=layer.rope is None or layer.rope.interleaved, KIND=KINDS[layer.ssmax.kind],
        SCALED=learned is not None, BIASED=bias is not None, OWNS=int(layer.owns_kv),
        LAYOUT=cache.kind, CL=cache.latent, CR=cache.rope, BCR=max(1, next_power(cache.rope)),
        BLOCK_SIZE=kv.latent.block_size,
        Hi=spec.heads if spec else 0, D=spec.head_dim if spec else 1,
        BD=next_power(spec.head_dim) if spec else 1, RI=spec.rope_dim if spec else 0,
        I_INTERLEAVED=bool(spec and spec.rope_interleaved), I_KIND=KINDS[index_ssmax.kind],
        I_SCALED=index_learned is not None, I_BIASED=index_bias is not None,
        I_NORM=bool(spec and spec.query_norm), PER_HEAD=q_norm is not None and q_norm.dim() == 2,
        I_LAYOUT=0 if keys is None else keys.kind,
        I_BLOCK_SIZE=kv.index_keys.block_size if kv.index_keys is not None else 1,
        BW=next_power(spec.heads) if spec else 1, HEADS=_HEADS, PARTS=made.shape[0],
        DEPENDENT=ahead, num_warps=4, **dependent(ahead),
    )  # fmt: skip
    return AttnInputs(q, index_q, index_weights)
