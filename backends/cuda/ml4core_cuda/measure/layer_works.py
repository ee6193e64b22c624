"""Works of a whole layer's decode step, stage by stage and as one: a TP 8 rank of the full model,
and a few layers in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache as kept
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    IndexerSpec,
    LayerKV,
    LayerSpec,
    MoESpec,
    RopeSpec,
    Segment,
    Selection,
    SSMaxSpec,
    StepPlan,
    StepShape,
)
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_cuda.kernels import attn_products
from ml4core_cuda.kernels.attn_inputs import attn_inputs
from ml4core_cuda.kernels.attn_output import attn_output
from ml4core_cuda.kernels.ffn import moe_ffn
from ml4core_cuda.kernels.latency_layer import latency_layer
from ml4core_cuda.kernels.select_stage import select_stage
from ml4core_cuda.kernels.sparse_mla import sparse_mla
from ml4core_cuda.measure import sizes
from ml4core_cuda.measure.judges import far_off
from ml4core_cuda.measure.standard import (
    composed_inputs,
    composed_layer,
    composed_output,
    standard_layer,
)
from ml4core_cuda.measure.work import Draw, Inputs, Work

BLOCK, CONTEXT = 64, 65536
_INDEXER = IndexerSpec(32, 128, 2048, 64, ssmax=SSMaxSpec("log", per_head=True))
_FULL = LayerSpec(
    index=0, hidden_size=6144, heads=8, kv_lora_rank=512, q_lora_rank=None, nope_dim=64,
    rope_dim=64, v_dim=128, norm_eps=1e-6, softmax_scale=128**-0.5, rope=RopeSpec(64, 1e4),
    ssmax=SSMaxSpec("llama4"), kv_source=0, topk_source=0,
    indexer=_INDEXER,
    dense_width=None, moe=MoESpec(128, 4, 768, 768),
)  # fmt: skip
_SMALL = replace(
    _FULL, hidden_size=256, heads=2, indexer=replace(_INDEXER, heads=4, topk=32),
    moe=MoESpec(8, 2, 128, 128),
)  # fmt: skip


def layer_of(owner: bool, small: bool) -> LayerSpec:
    """One that has an indexer, or one that reuses a selection."""
    layer = _SMALL if small else _FULL
    return layer if owner else replace(layer, index=1, kv_source=1, indexer=None)


def works(*, small: bool) -> Iterator[Work]:
    """``small`` ones for the interpreter."""
    context = 200 if small else CONTEXT
    for owner in (False, True):
        layer = layer_of(owner, small)
        for rows in (1,) if small else (1, 2, 4):
            yield from _of(layer, owner, rows, context, small)
    if not small:
        yield _slice(context)


def _of(layer: LayerSpec, owner: bool, rows: int, context: int, small: bool) -> Iterator[Work]:
    make = partial(step, layer=layer, rows=rows, context=context)
    who = f"{'owner' if owner else 'sharer'} {rows} rows"
    floor = _attention_bytes(layer, context, rows) + _expert_bytes(layer, rows)
    composed = composed_layer(layer)
    floor_us = floor / 4.25e12 * 1e6
    columns = _columns(layer)
    shape = attn_products.shape_key("fp8_block", rows, columns, layer.hidden_size)
    tuned = [("attn_inputs", shape, () if small else sizes.attn_inputs(rows))]
    inputs = attn_inputs(layer)
    yield Work(
        f"attn_inputs fused {who}", "layer", make,
        lambda w, plan, kv, residual, hidden, *_: inputs(w, plan, kv, residual, hidden),
        partial(_inputs_error, layer=layer), columns * layer.hidden_size, tuned=tuned,
    )  # fmt: skip
    if rows == 1:
        yield from _stages(layer, who, make)
    for name, call in (
        ("composed", composed),
        ("standard", standard_layer(layer)),
        ("latency-specialised", latency_layer(layer)),
    ):
        told, us = "", 0.0
        if rows == 1 and name != "composed":
            times = 1.8 if name.startswith("latency") else 2.5
            told, us = f"{times}x the floor of {floor_us:.1f} us", times * floor_us
        yield Work(
            f"layer {name} {who}", "layer", make, call,
            None if name == "composed" else partial(_layer_error, composed=composed), floor,
            target=told, target_us=us,
        )  # fmt: skip


def _stages(layer: LayerSpec, who: str, make: Callable[..., Inputs]) -> Iterator[Work]:
    """The stages of the step, composed and as bound, each on inputs of its own."""
    assert layer.moe is not None
    feed, output = moe_ffn(layer.moe, layer.norm_eps, None), attn_output(layer)

    def q_of(hidden: Tensor) -> Tensor:
        shape = (len(hidden), layer.heads, layer.absorbed_dim)
        return hidden.new_ones(1).expand(shape).contiguous()

    def index_of(hidden: Tensor) -> tuple[Tensor, Tensor]:
        spec = layer.indexer
        assert spec is not None
        q = hidden[:, : spec.heads].float().unsqueeze(-1).expand(-1, -1, spec.head_dim)
        return q.contiguous(), hidden[:, : spec.heads].float()

    parts: dict[str, Callable[..., Any]] = {
        "attn_inputs composed": lambda w, plan, kv, r, h, *_: composed_inputs(
            layer, w, plan, kv, h
        ),
        "sparse_mla": lambda w, plan, kv, r, h, s, _: sparse_mla(
            q_of(h), kv.latent, s.slots, s.lens, layer.softmax_scale
        ),
        "attn_output composed": lambda w, plan, kv, r, h, *_: composed_output(
            layer, w, q_of(h)[..., : layer.kv_lora_rank].contiguous(), r
        ),
        "attn_output": lambda w, plan, kv, r, h, *_: output(
            w, q_of(h)[..., : layer.kv_lora_rank].contiguous(), r
        ),
        "ffn": lambda w, plan, kv, r, h, s, norm: feed(w, r, h, norm),
    }
    if layer.owns_index:
        select = select_stage(layer)
        parts["select"] = lambda w, plan, kv, r, h, *_: select(plan, kv, *index_of(h))
    for name, call in parts.items():
        yield Work(f"stage {name} {who}", "stages", make, call)


def _slice(context: int) -> Work:
    """Two owners and two sharers in turn, of full width of experts, one row."""
    layers = [
        replace(layer_of(owner, False), moe=MoESpec(128, 4, 6144, 6144))
        for owner in (True, False, True, False)
    ]
    calls = [standard_layer(layer) for layer in layers]

    def make(seed: int, device: torch.device) -> Inputs:
        steps = [
            step(4 * seed + i, device, layer=layer, rows=1, context=context)
            for i, layer in enumerate(layers)
        ]
        return (steps,)

    def call(steps: list[Inputs]) -> Any:
        state: Any = steps[0][3:6]
        for one, step in zip(calls, steps, strict=True):
            state = one(*step[:3], *state, step[6])
        return state

    nbytes = sum(_attention_bytes(one, context, 1) + _expert_bytes(one, 1) for one in layers)
    told = "within 5% of the sum of its kernels"
    return Work("slice of 4 layers, 1 row", "slice", make, call, None, nbytes, target=told)


def _columns(layer: LayerSpec) -> int:
    spec = layer.indexer
    found = layer.heads * layer.q_dim + layer.kv_lora_rank + layer.rope_dim
    return found + ((spec.heads + 1) * spec.head_dim + spec.heads if spec else 0)


def _attention_bytes(layer: LayerSpec, context: int, rows: int) -> int:
    """The fewest that its attention reads."""
    spec, width = layer.indexer, layer.hidden_size
    found = _columns(layer) * width + width * layer.heads * layer.v_dim
    found += 2 * layer.heads * layer.kv_lora_rank * (layer.nope_dim + layer.v_dim)
    keys = min(context, spec.topk if spec else 2048)
    found += rows * keys * latent_layout("fp8_ds_mla").bytes_per_token
    if spec is not None:
        found += 3 * spec.heads * width + rows * context * (spec.head_dim + 4)
    return found


def _expert_bytes(layer: LayerSpec, rows: int) -> int:
    moe, width = layer.moe, layer.hidden_size
    assert moe is not None
    chosen = moe.experts * (1 - (1 - moe.topk / moe.experts) ** rows)
    return int((chosen + 1) * 3 * width * moe.expert_width) + 4 * moe.experts * width


@kept
def _experts(width: int, inner: int, count: int, device: torch.device) -> dict[str, Any]:
    """Those of one layer, for all works of its width."""
    draw = Draw(2, device)
    return {
        "experts_w13": draw.weight("fp8_block", count, 2 * inner, width),
        "experts_w2": draw.weight("fp8_block", count, width, inner),
    }


def forget() -> None:
    """Gives memory of experts back."""
    _experts.cache_clear()


def step(seed: int, device: torch.device, *, layer: LayerSpec, rows: int, context: int) -> Inputs:
    """weights, plan, caches, residual, hidden, selection and the next norm."""
    draw, spec, moe = Draw(seed, device), layer.indexer, layer.moe
    assert moe is not None
    width = layer.hidden_size
    pages = -(-(context + 1) // BLOCK)
    norm = partial(draw.full, 1.0, dtype=torch.bfloat16)
    learned = partial(draw.full, 1.0, dtype=torch.float32)
    w: dict[str, Any] = {
        "attention_norm": norm(width), "ffn_norm": norm(width),
        "wq": draw.weight("fp8_block", layer.heads * layer.q_dim, width),
        "wkv_a": draw.weight("fp8_block", layer.kv_lora_rank + layer.rope_dim, width),
        "kv_a_norm": norm(layer.kv_lora_rank),
        "w_uk": draw.weight("bf16", layer.heads, layer.kv_lora_rank, layer.nope_dim),
        "w_uv": draw.weight("bf16", layer.heads, layer.v_dim, layer.kv_lora_rank),
        "wo": draw.weight("fp8_block", width, layer.heads * layer.v_dim),
        "inv_freq": 1e4 ** (-draw.count(32, torch.float32) / 32),
        "gate": draw.normal(moe.experts, width) * width**-0.5,
        "shared_w13": draw.weight("fp8_block", 2 * moe.shared_width, width),
        "shared_w2": draw.weight("fp8_block", width, moe.shared_width),
        **_experts(width, moe.expert_width, moe.experts, device),
    }  # fmt: skip
    if spec is not None:
        w |= {
            "index_wq": draw.weight("fp8_block", spec.heads * spec.head_dim, width),
            "index_wk": draw.weight("fp8_block", spec.head_dim, width),
            "index_weights_proj": draw.weight("fp32", spec.heads, width),
            "index_q_norm_weight": learned(spec.head_dim),
            "index_q_norm_bias": learned(spec.head_dim),
            "index_k_norm_weight": learned(spec.head_dim),
            "index_k_norm_bias": learned(spec.head_dim),
            "index_ssmax_scale": learned(spec.heads),
        }
    table = 1 + draw.choices(rows * pages, 1, rows * pages, torch.int32).view(rows, pages)
    at = draw.full(context, rows, dtype=torch.int64)
    slots = table[:, -1].long() * BLOCK + context % BLOCK
    shape = StepShape(
        Segment(rows, rows, 1), Segment(0, 0, 0), Segment(0, 0, 0),
        (("latent", pages), ("index", pages)), rows,
    )  # fmt: skip
    plan = StepPlan(
        shape, at, at, draw.count(rows, torch.int64), draw.count(rows + 1),
        draw.full(context + 1, rows), {"latent": table, "index": table},
        {"latent": slots, "index": slots}, draw.count(rows, torch.int64),
    )  # fmt: skip
    kv = LayerKV(
        draw.cache(latent_layout("fp8_ds_mla"), rows * pages + 1, BLOCK),
        draw.cache(index_layout("planar_f32"), rows * pages + 1, BLOCK) if spec else None,
    )
    keys = min(context, spec.topk if spec else (32 if context < 2048 else 2048))
    chosen = draw.choices(rows * pages * BLOCK, rows, keys, torch.int32)
    given = Selection(chosen, draw.full(keys, rows), chosen, draw.full(0, rows, dtype=torch.bool))
    residual, hidden = draw.bf16(rows, width), draw.bf16(rows, width)
    return w, plan, kv, residual, hidden, given, norm(width)


def _inputs_error(inputs: Inputs, found: Any, *, layer: LayerSpec) -> float:
    w, plan, kv, _, hidden, *_ = inputs
    want = composed_inputs(layer, w, plan, kv, hidden)
    pairs = [(a, b) for a, b in zip(found, want, strict=True) if b is not None]
    return max(far_off(a, b.double(), 1.5e-2) for a, b in pairs)


def _layer_error(inputs: Inputs, found: Any, *, composed: Callable[..., Any]) -> float:
    want = composed(*inputs)
    return max(far_off(a, b.double(), 3e-2) for a, b in zip(found[:2], want[:2], strict=True))
