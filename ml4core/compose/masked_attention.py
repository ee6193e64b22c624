"""Attention under a mask on the host, without the keys that no row of a tile may see.

It is one node of a traced graph: how many keys a tile sees is data.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 64
"""Rows of a tile: the fewer, the fewer keys they see; below this torch's kernel gets slower."""


@torch.library.custom_op(
    "ml4core::masked_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor ends, float scale) -> Tensor",
)
def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ends: Tensor, scale: float
) -> Tensor:
    """``q`` [R, N, Q, W] on ``k`` and ``v`` [R, N, S, W] where ``mask`` [R, Q, S] is true: out
    [R, N, Q, W].

    A row's mask is true somewhere, and false from its ``ends`` [R, Q], at least 1, on.
    """
    out = torch.empty_like(q)
    rows = q.shape[2]
    for request, limits in enumerate(ends.tolist()):
        one = slice(request, request + 1)
        for first in range(0, rows, TILE_ROWS):
            tile = slice(first, min(first + TILE_ROWS, rows))
            seen = slice(0, max(limits[tile]))
            out[one, :, tile] = F.scaled_dot_product_attention(
                q[one, :, tile],
                k[one, :, seen],
                v[one, :, seen],
                attn_mask=mask[one, None, tile, seen],
                scale=scale,
            )
    return out


@masked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ends: Tensor, scale: float) -> Tensor:
    return torch.empty_like(q)
