"""The stage ``select`` by AITER: scores, then its stable top-k. Decodes and verify windows read
keys from their pages; rows of prompts score keys that are gathered first, request after request.

How many keys are gathered only the device knows; memory is for as many as the pages hold, and rows
are worked on in turn where their scores would take too much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, LayerSpec, Selection, StepPlan
from ml4core_rocm.kernels.aiter_logits import gathered_keys, paged_scores, run_scores
from ml4core_rocm.kernels.aiter_topk import topk_rows, topk_windows
from ml4core_rocm.kernels.slot_streams import starts_of
from ml4core_triton.kernels.to_slots import to_slots

SCORE_BYTES = 512 << 20
"""Bound of the scores of rows of prompts that are held at once."""

Chosen = tuple[Tensor, Tensor, Tensor]


def select_stage(layer: LayerSpec) -> Callable[..., Selection]:
    """Bound for a layer that owns an indexer."""
    spec = layer.indexer
    if spec is None:
        raise ValueError(f"layer {layer.index} owns no indexer: it can't select")
    scale = spec.scale

    def call(plan: StepPlan, kv: LayerKV, index_q: Tensor, index_weights: Tensor) -> Selection:
        cache = kv.index_keys
        if cache is None:
            raise ValueError(f"layer {layer.index} owns an indexer but was given no index cache")
        found: list[Chosen] = []
        row = request = 0
        for segment in plan.shape.segments:
            rows = slice(row, row + segment.rows)
            requests = slice(request, request + segment.requests)
            q, weights = index_q[rows], index_weights[rows]
            if row >= plan.shape.rows - plan.shape.prefill.rows:
                found += _prompts(plan, cache, q, weights, scale, rows, requests)
            else:
                visible = plan.visible[rows]
                table = plan.block_tables["index"][requests]
                scores = paged_scores(q, weights, scale, cache, table, visible, segment.max_rows)
                found.append(topk_windows(scores, visible, segment.max_rows))
            row, request = rows.stop, requests.stop
        positions, lens, has_nan = (torch.cat(parts) for parts in zip(*found, strict=True))
        slots = to_slots(
            positions, plan.block_tables["latent"], plan.row_request, kv.latent.block_size
        )
        return Selection(positions, lens, slots, has_nan)

    return call


def _prompts(
    plan: StepPlan,
    cache: KVCache,
    q: Tensor,
    weights: Tensor,
    scale: float,
    rows: slice,
    requests: slice,
) -> Iterator[Chosen]:
    """What each row of the prefill segment chooses."""
    table, visible = plan.block_tables["index"][requests], plan.visible[rows]
    count, pages = table.shape
    longest = pages * cache.block_size
    # Rows behind those of the last request belong to none, and see nothing.
    owner = (plan.row_request[rows] - requests.start).clamp(0, count - 1)
    lengths = visible.new_zeros(count).scatter_reduce(0, owner, visible, "amax")
    starts = starts_of(lengths)
    gathered = gathered_keys(cache, table, starts, count * longest, longest)
    step = max(1, SCORE_BYTES // (4 * count * longest))
    for i in range(0, len(visible), step):
        part = slice(i, i + step)
        begins = starts[owner[part]]
        ends = begins + visible[part]
        scores = run_scores(q[part], weights[part], scale, gathered, begins, ends)
        yield topk_rows(scores, begins, ends)
