"""The stage ``sparse_mla``: over the selection, or over every visible key without one.

Launches over a selection may begin before the end of those before them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ml4core.api import LayerKV, LayerSpec, Selection, StepPlan
from ml4core_cuda.kernels.sparse_mla import sparse_mla
from ml4core_cuda.kernels.window_mla import window_mla


def sparse_mla_stage(layer: LayerSpec) -> Callable[..., tuple[Tensor, Tensor]]:
    scale = layer.softmax_scale

    def call(
        plan: StepPlan, kv: LayerKV, q: Tensor, selection: Selection | None
    ) -> tuple[Tensor, Tensor]:
        if selection is not None:
            return sparse_mla(q, kv.latent, selection.slots, selection.lens, scale, ahead=True)
        return dense(plan, kv, q, scale)

    return call


def dense(plan: StepPlan, kv: LayerKV, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every row over all its visible keys, segment by segment: out [T, N, L], lse [T, N]."""
    table = plan.block_tables["latent"]
    found = []
    first_row = first_request = 0
    for segment in plan.shape.segments:
        rows = slice(first_row, first_row + segment.rows)
        requests = slice(first_request, first_request + segment.requests)
        start = plan.query_start[first_request : requests.stop + 1] - first_row
        found.append(
            window_mla(
                q[rows],
                kv.latent,
                table[requests],
                start,
                plan.visible[rows],
                segment.max_rows,
                scale,
            )
        )
        first_row, first_request = rows.stop, requests.stop
    if len(found) == 1:
        return found[0]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses)
