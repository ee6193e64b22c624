"""Attention with keys and values expanded a head, for the pieces of a step where that costs less.

What training computes: a key costs its expansion once, and less for each row and head after that.
``--attention-config '{"mla_form": ...}'`` asks for one form; ``auto`` takes the cheaper one for
each piece. Both read the same caches and the same selection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.api import LayerKV, LayerSpec, Selection, StepPlan
from ml4core.compose.attention import (
    GATHER_COST,
    Children,
    Weights,
    absorbed,
    attend,
    normed,
    project_output,
    query_latent_index,
)
from ml4core.compose.context import StageContext
from ml4core.compose.grid import Grid
from ml4core.compose.masked_attention import TILE_ROWS, masked_attention
from ml4core.compose.segments import Piece, pieces

_EXPANDED_BYTES = 256 << 20
"""Bound of a piece's expanded keys and values."""


def attention(
    ctx: StageContext, children: Children
) -> Callable[..., tuple[Tensor, Tensor, Selection | None]]:
    layer = ctx.spec
    forced = ctx.mla_form == "unabsorbed"

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
        columns = plan.block_tables["latent"].shape[1] * kv.latent.block_size
        keys = columns if selection is None else selection.positions.shape[1]
        values = []
        for piece in pieces(plan):
            nope, pe = q_nope[piece.rows], q_pe[piece.rows]
            if forced or expansion_pays(layer, piece, columns, keys):
                q = torch.cat([nope, pe], dim=-1)
                values.append(_expanded(ctx, w, plan, kv, q, selection, piece))
            else:
                q = absorbed(ctx, w, nope, pe)
                out, _ = attend(ctx, plan, kv, q, selection, piece)
                values.append(ctx.ops["head_gemm"](out, w["w_uv"]))
        residual, hidden = project_output(
            ctx, w, values[0] if len(values) == 1 else torch.cat(values), residual
        )
        return residual, hidden, selection

    return call


def expansion_pays(layer: LayerSpec, piece: Piece, columns: int, keys: int) -> bool:
    """Whether expanding all ``columns`` beats attending to ``keys`` latents a row.

    Counts multiplications; both forms read the caches about once.
    """
    requests = piece.requests.stop - piece.requests.start
    rows = requests * piece.max_rows
    latent_width = layer.absorbed_dim + layer.kv_lora_rank
    head_width = layer.q_dim + layer.v_dim
    expanded = layer.heads * (layer.nope_dim + layer.v_dim) * layer.kv_lora_rank
    if 4 * requests * columns * layer.heads * (head_width + layer.nope_dim) > _EXPANDED_BYTES:
        return False
    pays = columns * (requests * expanded + rows * layer.heads * head_width)
    paged = rows * columns * layer.heads * latent_width
    gathered = rows * keys * (layer.heads + GATHER_COST) * latent_width
    return pays < (paged if keys == columns else min(paged, gathered))


def _expanded(
    ctx: StageContext,
    w: Weights,
    plan: StepPlan,
    kv: LayerKV,
    q: Tensor,
    selection: Selection | None,
    piece: Piece,
) -> Tensor:
    """Values [rows, N, V] of a piece's queries ``q`` [rows, N, P+R].

    Rows lie on a grid [R, Q] of requests; key columns [S] are positions.
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
    rows = ctx.ops["gather_kv"](kv.latent, slots).unsqueeze(1)  # [R, 1, S, width]
    latent, k_pe = rows[..., : layer.absorbed_dim].split([layer.kv_lora_rank, layer.rope_dim], -1)
    k_nope = latent @ w["w_uk"].data.float()  # [R, N, S, P]
    values = latent @ w["w_uv"].data.float().transpose(1, 2)  # [R, N, S, V]
    keys = torch.cat([k_nope, k_pe.expand(-1, layer.heads, -1, -1)], dim=-1)
    queries = grid.spread(q).float().transpose(1, 2)  # [R, N, Q, P+R]
    # A row that sees nothing is padding: any finite value will do, such as the first key.
    ends = visible.clamp(min=1, max=columns.numel())
    if selection is None:
        mask = columns < ends.unsqueeze(-1)  # [R, Q, S]
    else:
        mask = columns < visible.unsqueeze(-1)
        mask = mask & _members(grid.spread(selection.positions[piece.rows]), columns.numel())
        mask = mask | ((columns == 0) & ~mask.any(-1, keepdim=True))
    # torch's fused kernels want heads of one width.
    width = max(layer.q_dim, layer.v_dim)
    queries, keys, values = (_widened(x, width) for x in (queries, keys, values))
    scale = layer.softmax_scale
    if q.device.type == "cpu" and piece.max_rows > TILE_ROWS:
        out = masked_attention(queries, keys, values, mask, ends, scale)
    else:
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask.unsqueeze(1), scale=scale
        )
    out = out[..., : layer.v_dim].transpose(1, 2).to(q.dtype)  # [R, Q, N, V]
    return grid.collect(out, q.shape[0])


def _widened(x: Tensor, width: int) -> Tensor:
    """``x`` [..., w] with zeros behind, [..., width]; itself if it has that width."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _members(positions: Tensor, columns: int) -> Tensor:
    """Which columns [..., S] the positions [..., k] name; -1 names none."""
    wanted = torch.where(positions < 0, columns, positions.to(torch.int64))
    mask = torch.zeros(
        *positions.shape[:-1], columns + 1, dtype=torch.bool, device=positions.device
    )
    return mask.scatter(-1, wanted, True)[..., :-1]
