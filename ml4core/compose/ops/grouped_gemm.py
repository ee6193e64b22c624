"""A matrix product of rows sorted by group with the matrix of their group.

It is one node of a traced graph: what is fastest depends on the device and on how the rows fall.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.compose.ops.tiles import tile_size, tiles


@torch.library.custom_op(
    "ml4core::grouped_gemm", mutates_args=(), schema="(Tensor x, Tensor w, Tensor ends) -> Tensor"
)
def grouped_gemm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows of ``x`` [M, K] times the transpose of their matrix of ``w`` [E, N, K]: fp32 [M, N].

    Rows ends[e - 1] .. ends[e] - 1 belong to matrix e; ``ends`` is int32 [E]. Rows
    behind its last value are of no matrix, and theirs of the result hold anything.
    """
    if x.device.type == "cpu":
        return _by_group(x, w, ends)
    if x.dtype == w.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
        with suppress(NotImplementedError):  # raised where a device has no kernel for it
            return F.grouped_mm(x, w.transpose(1, 2), offs=ends).to(torch.float32)
    return _by_row(x, w, ends)


@grouped_gemm.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]), dtype=torch.float32)


def _by_group(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """A product for each group that has rows. The data is on the host, so looking at it is free."""
    wide = x.to(torch.float32)
    out = wide.new_empty(x.shape[0], w.shape[1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(wide[start:end], w[group].to(torch.float32).t(), out=out[start:end])
            start = end
    return out


def _by_row(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """A product for each row with a copy of its matrix."""
    row = torch.arange(x.shape[0], device=x.device)
    group = (row.unsqueeze(-1) >= ends).sum(-1).clamp(max=w.shape[0] - 1)
    size = tile_size(x.shape[0], 4 * w.shape[1] * w.shape[2])
    parts = []
    for a, b in tiles(x.shape[0], size):
        mine = w.index_select(0, group[a:b]).to(torch.float32)
        parts.append(torch.bmm(mine, x[a:b].to(torch.float32).unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts)
