"""The stage ``select`` of steps without prompts, by AITER: paged scores, then its stable top-k.

Rows of a prompt would need their lengths on the host, where its scores gather keys first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ml4core.api import LayerKV, LayerSpec, Selection, StepPlan
from ml4core_rocm.kernels.aiter_logits import paged_scores
from ml4core_rocm.kernels.aiter_topk import topk_windows
from ml4core_rocm.kernels.to_slots import to_slots


def select_stage(layer: LayerSpec) -> Callable[..., Selection]:
    """Bound for a layer that owns an indexer, and for steps of decodes and verify windows."""
    spec = layer.indexer
    if spec is None:
        raise ValueError(f"layer {layer.index} owns no indexer: it can't select")
    scale = spec.scale

    def call(plan: StepPlan, kv: LayerKV, index_q: Tensor, index_weights: Tensor) -> Selection:
        cache = kv.index_keys
        if cache is None:
            raise ValueError(f"layer {layer.index} owns an indexer but was given no index cache")
        if plan.shape.prefill.rows:
            raise ValueError(f"{plan.shape.prefill.rows} rows of prompts; AITER selects without")
        found, row, request = [], 0, 0
        for segment in plan.shape.segments:
            rows = slice(row, row + segment.rows)
            table = plan.block_tables["index"][request : request + segment.requests]
            visible = plan.visible[rows]
            scores = paged_scores(
                index_q[rows], index_weights[rows], scale, cache, table, visible, segment.max_rows
            )
            found.append(topk_windows(scores, visible, segment.max_rows))
            row, request = row + segment.rows, request + segment.requests
        positions, lens, has_nan = (torch.cat(parts) for parts in zip(*found, strict=True))
        slots = to_slots(
            positions, plan.block_tables["latent"], plan.row_request, kv.latent.block_size
        )
        return Selection(positions, lens, slots, has_nan)

    return call
