"""Routed experts on the host, one after the other: what lies between an expert's two products stays
in a core's cache, where a step of all experts at once would go through memory.

It is one node of a traced graph: how the rows fall is data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.compose.ops.gemms import silu_mul


@torch.library.custom_op(
    "ml4core::grouped_mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor rows, Tensor w13, Tensor w2, Tensor ends) -> Tensor",
)
def grouped_mlp(x: Tensor, rows: Tensor, w13: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
    """Rows ``x[rows]`` of ``x`` [T, H], rows [M], through their expert: fp32 [M, H].

    The experts are ``w13`` [E, 2I, H] and ``w2`` [E, H, I]; rows ends[e - 1] .. ends[e] - 1 are
    those of expert e, ``ends`` int32 [E]. Rows behind the last end are zeros.
    """
    out = x.new_empty((rows.shape[0], w2.shape[1]), dtype=torch.float32)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            mine = x.index_select(0, rows[start:end]).to(torch.float32)
            inner = silu_mul(torch.mm(mine, w13[expert].to(torch.float32).t()))
            torch.mm(inner, w2[expert].to(torch.float32).t(), out=out[start:end])
            start = end
    out[start:] = 0.0
    return out


@grouped_mlp.register_fake
def _(x: Tensor, rows: Tensor, w13: Tensor, w2: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], w2.shape[1]), dtype=torch.float32)
