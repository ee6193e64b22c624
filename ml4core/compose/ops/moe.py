"""Routing and routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.api import Weight
from ml4core.compose.ops.gemms import silu_mul
from ml4core.compose.ops.grouped_gemm import grouped_gemm
from ml4core.compose.ops.grouped_mlp import grouped_mlp
from ml4core.compose.ops.ordering import order_key
from ml4core.compose.ops.tiles import tile_size, tiles
from ml4core.compose.ops.weights import decode_weight

_CACHED_BYTES = 1 << 20
"""Temporaries of a tile that stay in a core's own cache."""


def router(
    x: Tensor, weight: Tensor, topk: int, renormalize: bool, routed_scale: float
) -> tuple[Tensor, Tensor]:
    """Weights fp32 [T, topk] and expert ids int64 [T, topk] of ``x`` [T, H], ``weight`` [E, H]."""
    logits = F.linear(x.to(torch.float32), weight.to(torch.float32))
    odds = torch.softmax(logits, dim=-1)
    broken = ~torch.isfinite(odds).all(-1, keepdim=True)  # NaN or +inf among the logits
    # No two keys are equal, so what torch does with ties doesn't matter: the lower id has more.
    place = torch.arange(logits.shape[-1] - 1, -1, -1, device=x.device)
    key = (order_key(torch.where(broken, 0.0, logits)).to(torch.int64) << 32) | place
    ids = logits.shape[-1] - 1 - (key.topk(topk, dim=-1).values & 0xFFFFFFFF)
    chosen = odds.gather(-1, ids)
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return torch.where(broken, 0.0, chosen * routed_scale), ids


def moe_experts(
    x: Tensor, w13: Weight, w2: Weight, weights: Tensor, ids: Tensor, first_expert: int = 0
) -> Tensor:
    """The weighted sum of experts ids [T, topk] on ``x`` [T, H], in x's dtype."""
    rows, topk = ids.shape
    count = w13.shape[0]
    local = ids - first_expert
    mine = (local >= 0) & (local < count) & (weights != 0)
    # Other choices stand behind the last group, and add nothing, whatever they would be.
    expert, order = torch.where(mine, local, count).flatten().sort(stable=True)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=x.device)
    ends = counts.scatter_add(0, expert, torch.ones_like(expert)).cumsum(0)[:count].to(torch.int32)
    if x.device.type == "cpu":
        outer = grouped_mlp(x, order // topk, _stack(w13), _stack(w2), ends)
    else:
        inner = grouped_gemm(x.index_select(0, order // topk), _stack(w13), ends)
        outer = grouped_gemm(silu_mul(inner), _stack(w2), ends)
    back = torch.empty_like(order).scatter(0, order, torch.arange(rows * topk, device=x.device))
    factor = torch.where(mine, weights, 0.0).unsqueeze(-1)
    size = rows
    if x.device.type == "cpu":
        size = tile_size(rows, 3 * 4 * topk * outer.shape[1], _CACHED_BYTES)
    back = back.view(rows, topk)
    parts = [_combined(outer, back[a:b], factor[a:b]) for a, b in tiles(rows, size)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(x.dtype)


def _combined(outer: Tensor, places: Tensor, factor: Tensor) -> Tensor:
    """Rows places [t, topk] of ``outer`` [M, H] times factor [t, topk, 1], summed to [t, H].

    The sum runs over choices, in their order.
    """
    each = outer.index_select(0, places.flatten()).view(*places.shape, outer.shape[1])
    if outer.device.type != "cpu":  # there, rows behind the last group may hold anything
        each = each.masked_fill_(factor == 0, 0.0)
    return each.mul_(factor).sum(1)


def _stack(weight: Weight) -> Tensor:
    """The matrices [E, N, K], in bf16 or fp32."""
    return weight.data if weight.format == "bf16" else decode_weight(weight)
