"""Attention with keys and values expanded a head: what training computes. Costs more a key, less a
head dim.

A stage of its own, chosen by ``--attention-config '{"mla_form": "unabsorbed"}'``. It reads the same
caches and the same selection as the absorbed form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ml4core.api import LayerKV, Selection, StepPlan
from ml4core.compose.attention import (
    Children,
    Weights,
    normed,
    project_output,
    query_latent_index,
)
from ml4core.compose.context import StageContext
from ml4core.compose.grid import Grid
from ml4core.compose.segments import Piece, pieces


def attention(
    ctx: StageContext, children: Children
) -> Callable[..., tuple[Tensor, Tensor, Selection | None]]:
    layer = ctx.spec

    def call(
        w: Weights,
        plan: StepPlan,
        kv: LayerKV,
        residual: Tensor,
        hidden: Tensor | None,
        selection: Selection | None,
    ) -> tuple[Tensor, Tensor, Selection | None]:
        hidden = normed(ctx, w, residual, hidden)
        q_nope, q_pe, index_q, index_weights = query_latent_index(ctx, w, plan, kv, hidden)
        if layer.owns_index:
            selection = children["select"](plan, kv, index_q, index_weights)
        q = torch.cat([q_nope, q_pe], dim=-1)
        values = torch.cat(
            [_piece(ctx, w, plan, kv, q, selection, piece) for piece in pieces(plan)]
        )
        residual, hidden = project_output(ctx, w, values, residual)
        return residual, hidden, selection

    return call


def _piece(
    ctx: StageContext,
    w: Weights,
    plan: StepPlan,
    kv: LayerKV,
    q: Tensor,
    selection: Selection | None,
    piece: Piece,
) -> Tensor:
    """Values [rows, N, V] of one piece. Rows lie on a grid [R, Q] of requests; key columns [S] are
    positions.
    """
    layer = ctx.spec
    size = kv.latent.block_size
    table = plan.block_tables["latent"][piece.requests]
    grid = Grid(piece.query_start, piece.max_rows)
    visible = grid.spread(plan.visible[piece.rows])  # [R, Q]
    columns = torch.arange(table.shape[1] * size, device=q.device)
    slots = table.repeat_interleave(size, dim=1) * size + columns % size
    # A key that no row of its request may see could hold anything: read it as zeros.
    slots = torch.where(columns < visible.amax(1, keepdim=True), slots, -1).to(torch.int32)
    rows = ctx.ops["gather_kv"](kv.latent, slots).to(q.dtype)  # [R, S, width]
    latent = rows[..., : layer.kv_lora_rank]
    k_pe = rows[..., layer.kv_lora_rank : layer.absorbed_dim].unsqueeze(2)
    k_nope = torch.einsum("rsl,nlp->rsnp", latent, w["w_uk"].data.to(q.dtype))
    values = torch.einsum("rsl,nvl->rsnv", latent, w["w_uv"].data.to(q.dtype))
    k = torch.cat([k_nope, k_pe.expand(-1, -1, layer.heads, -1)], dim=-1)
    mask = columns < visible.unsqueeze(-1)  # [R, Q, S]
    if selection is not None:
        positions = grid.spread(selection.positions[piece.rows]).long()
        chosen = torch.zeros(*visible.shape, columns.numel() + 1, dtype=torch.bool, device=q.device)
        positions = torch.where(positions < 0, columns.numel(), positions)
        mask = mask & chosen.scatter(-1, positions, True)[..., :-1]
    scores = torch.einsum("rqnd,rsnd->rnqs", grid.spread(q[piece.rows]).float(), k.float())
    scores = (scores * layer.softmax_scale).masked_fill(~mask.unsqueeze(1), float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    out = torch.einsum("rnqs,rsnv->rqnv", weights, values.float()).to(q.dtype)
    return grid.collect(out, piece.rows.stop - piece.rows.start)
