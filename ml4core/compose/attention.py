"""The attention stages as compositions of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ml4core.api import AttnInputs, LayerKV, Selection, StepPlan
from ml4core.compose.context import StageContext
from ml4core.compose.hadamard import hadamard
from ml4core.compose.ops.attention import sparse_mla as gathered_mla
from ml4core.compose.ops.window import selected_mla
from ml4core.compose.segments import Piece, pieces

Weights = Mapping[str, Any]
Children = Mapping[str, Callable[..., Any]]

_SCORE_BYTES = 64 << 20
"""Bound of the score matrix of one tile of rows."""


def query_latent_index(
    ctx: StageContext, w: Weights, plan: StepPlan, kv: LayerKV, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Projects, rotates, scales and writes the caches.

    Returns q_nope [T,N,P], q_pe [T,N,R], index_q [T,Hi,D] fp32 and index_weights [T,Hi] fp32 (None
    without an indexer).
    """
    layer, ops = ctx.spec, ctx.ops
    rows = hidden.shape[0]
    q_input = hidden
    if layer.q_lora_rank is None:
        q = ops["gemm"](hidden, w["wq"])
    else:
        q_input = ops["rms_norm"](ops["gemm"](hidden, w["wq_a"]), w["q_a_norm"], layer.norm_eps)
        q = ops["gemm"](q_input, w["wq_b"])
    q = q.view(rows, layer.heads, layer.q_dim)
    q_nope, q_pe = q.split([layer.nope_dim, layer.rope_dim], dim=-1)
    if layer.rope is not None:
        q_pe = ops["rope"](q_pe, plan.positions, w["inv_freq"], layer.rope.interleaved, 1.0)
    if layer.ssmax.kind != "none":
        # A factor a head and row: the parts may be scaled apart.
        learned = (w.get("ssmax_scale"), w.get("ssmax_bias"))
        q_nope = ops["ssmax"](q_nope, plan.positions, layer.ssmax, *learned)
        if layer.rope_dim:
            q_pe = ops["ssmax"](q_pe, plan.positions, layer.ssmax, *learned)
    if layer.owns_kv:
        latent, k_pe = ops["gemm"](hidden, w["wkv_a"]).split(
            [layer.kv_lora_rank, layer.rope_dim], dim=-1
        )
        latent = ops["rms_norm"](latent, w["kv_a_norm"], layer.norm_eps)
        if layer.rope is not None:
            k_pe = ops["rope"](
                k_pe.unsqueeze(1), plan.positions, w["inv_freq"], layer.rope.interleaved, 1.0
            ).squeeze(1)
        ops["kv_write"](kv.latent, plan.slots["latent"], latent, k_pe if layer.rope_dim else None)
    index_q, index_weights = _index(ctx, w, plan, kv, hidden, q_input)
    return q_nope, q_pe, index_q, index_weights


def _index(
    ctx: StageContext, w: Weights, plan: StepPlan, kv: LayerKV, hidden: Tensor, q_input: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    layer, ops = ctx.spec, ctx.ops
    spec = layer.indexer
    if spec is None:
        return None, None
    if kv.index_keys is None:
        raise ValueError(f"layer {layer.index} owns an indexer but was given no index cache")
    source = hidden if spec.query_input == "hidden" else q_input
    q = ops["gemm"](source, w["index_wq"], torch.float32).view(-1, spec.heads, spec.head_dim)
    if spec.query_norm:
        q = ops["layer_norm"](q, w["index_q_norm_weight"], w["index_q_norm_bias"], spec.norm_eps)
    k = ops["gemm"](hidden, w["index_wk"], torch.float32)
    k = ops["layer_norm"](k, w["index_k_norm_weight"], w["index_k_norm_bias"], spec.norm_eps)
    index_weights = ops["gemm"](hidden, w["index_weights_proj"], torch.float32)

    def rotate(x: Tensor) -> Tensor:
        # The rotated dims stand first here, last in the main attention.
        head, tail = x.split([spec.rope_dim, spec.head_dim - spec.rope_dim], dim=-1)
        head = ops["rope"](head, plan.positions, w["inv_freq"], spec.rope_interleaved, 1.0)
        return torch.cat([head, tail], dim=-1)

    if spec.rope_dim:
        q, k = rotate(q), rotate(k.unsqueeze(1)).squeeze(1)
    if spec.hadamard:
        q, k = hadamard(q), hadamard(k)
    if spec.ssmax.kind != "none":
        q = ops["ssmax"](
            q, plan.positions, spec.ssmax, w.get("index_ssmax_scale"), w.get("index_ssmax_bias")
        )
    ops["indexer_write"](kv.index_keys, plan.slots["index"], k)
    return q, index_weights


def normed(ctx: StageContext, w: Weights, residual: Tensor, hidden: Tensor | None) -> Tensor:
    """The attention's input, normed here if the stage before didn't."""
    if hidden is not None:
        return hidden
    normed: Tensor = ctx.ops["rms_norm"](residual, w["attention_norm"], ctx.spec.norm_eps)
    return normed


def attn_inputs(ctx: StageContext, children: Children) -> Callable[..., AttnInputs]:
    def call(
        w: Weights, plan: StepPlan, kv: LayerKV, residual: Tensor, hidden: Tensor | None
    ) -> AttnInputs:
        hidden = normed(ctx, w, residual, hidden)
        q_nope, q_pe, index_q, index_weights = query_latent_index(ctx, w, plan, kv, hidden)
        return AttnInputs(absorbed(ctx, w, q_nope, q_pe), index_q, index_weights)

    return call


def absorbed(ctx: StageContext, w: Weights, q_nope: Tensor, q_pe: Tensor) -> Tensor:
    """The query [T, N, W] that meets latents: W_UK taken into it, then its rope part."""
    q_latent: Tensor = ctx.ops["head_gemm"](q_nope, w["w_uk"])
    return torch.cat([q_latent, q_pe], dim=-1) if ctx.spec.rope_dim else q_latent


def select(ctx: StageContext, children: Children) -> Callable[..., Selection]:
    spec = ctx.spec.indexer
    ops = ctx.ops

    def call(plan: StepPlan, kv: LayerKV, index_q: Tensor, index_weights: Tensor) -> Selection:
        if spec is None or kv.index_keys is None:
            raise ValueError(f"layer {ctx.spec.index} owns no indexer: it can't select")
        table = plan.block_tables["index"]
        columns = table.shape[1] * kv.index_keys.block_size
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for piece in pieces(plan, max(1, _SCORE_BYTES // (4 * columns))):
            visible = plan.visible[piece.rows]
            scores = ops["indexer_logits"](
                index_q[piece.rows],
                index_weights[piece.rows],
                spec.scale,
                kv.index_keys,
                table[piece.requests],
                piece.query_start,
                visible,
                piece.max_rows,
            )
            found.append(ops["topk"](scores, visible, spec.topk))
        positions, lens, has_nan = (torch.cat(part) for part in zip(*found, strict=True))
        slots = ops["to_slots"](
            positions, plan.block_tables["latent"], plan.row_request, kv.latent.block_size
        )
        return Selection(positions, lens, slots, has_nan)

    return call


GATHER_COST = 40
"""What it costs to gather a key for one row, in units of one head's arithmetic on a key."""


def sparse_mla(ctx: StageContext, children: Children) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(
        plan: StepPlan, kv: LayerKV, q: Tensor, selection: Selection | None
    ) -> tuple[Tensor, Tensor]:
        found = [attend(ctx, plan, kv, q[p.rows], selection, p) for p in pieces(plan)]
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(lses)

    return call


def attend(
    ctx: StageContext,
    plan: StepPlan,
    kv: LayerKV,
    q: Tensor,
    selection: Selection | None,
    piece: Piece,
) -> tuple[Tensor, Tensor]:
    """out [rows, N, L] and lse of one piece's absorbed queries ``q`` [rows, N, W]."""
    layer, ops = ctx.spec, ctx.ops
    table = plan.block_tables["latent"][piece.requests]
    visible = plan.visible[piece.rows]
    paged = (q, kv.latent, table, piece.query_start, visible, piece.max_rows, layer.softmax_scale)
    if selection is None:
        out, lse = ops["window_mla"](*paged, None)
        return out, lse
    positions, slots = selection.positions[piece.rows], selection.slots[piece.rows]
    columns = table.shape[1] * kv.latent.block_size
    # A backend's own op is always called.
    if ops["sparse_mla"] is gathered_mla and _whole_pages_pay(
        piece.max_rows, columns, positions.shape[1], layer.heads
    ):
        return selected_mla(*paged, positions)
    out, lse = ops["sparse_mla"](
        q, kv.latent, slots, selection.lens[piece.rows], layer.softmax_scale
    )
    return out, lse


def _whole_pages_pay(rows: int, columns: int, topk: int, heads: int) -> bool:
    """Whether a chunk attends faster to whole pages under a mask than to gathered keys."""
    return rows >= 16 and columns * heads <= topk * (heads + GATHER_COST)


def attn_output(ctx: StageContext, children: Children) -> Callable[..., tuple[Tensor, Tensor]]:
    ops = ctx.ops

    def call(w: Weights, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        values = ops["head_gemm"](out, w["w_uv"])
        return project_output(ctx, w, values, residual)

    return call


def project_output(
    ctx: StageContext, w: Weights, values: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """values [T,N,V] through wo, summed over ranks into the residual, and the feed-forward's
    norm.
    """
    x = ctx.ops["gemm"](values.flatten(1), w["wo"])
    residual, hidden = ctx.ops["all_reduce_rms_norm"](
        x, residual, w["ffn_norm"], ctx.spec.norm_eps, ctx.collectives
    )
    return residual, hidden


def attention(
    ctx: StageContext, children: Children
) -> Callable[..., tuple[Tensor, Tensor, Selection | None]]:
    owns_index = ctx.spec.owns_index

    def call(
        w: Weights,
        plan: StepPlan,
        kv: LayerKV,
        residual: Tensor,
        hidden: Tensor | None,
        selection: Selection | None,
    ) -> tuple[Tensor, Tensor, Selection | None]:
        inputs = children["attn_inputs"](w, plan, kv, residual, hidden)
        if owns_index:
            selection = children["select"](plan, kv, inputs.index_q, inputs.index_weights)
        out, _ = children["sparse_mla"](plan, kv, inputs.q, selection)
        residual, hidden = children["attn_output"](w, out, residual)
        return residual, hidden, selection

    return call
