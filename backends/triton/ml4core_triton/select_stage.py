"""The stage ``select``: index scores, top-k and slots, with nothing of it told to the host.

Scores of columns that a row doesn't see are neither computed nor written: top-k doesn't read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ml4core.api import LayerKV, LayerSpec, Selection, StepPlan

SCORE_BYTES = 512 << 20
"""Bound of the scores that are held at once; more rows are worked on in turn."""

Chosen = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""positions, lens, has_nan and slots, as of ``Selection`` but for their order."""


def select_stage(
    layer: LayerSpec, scores: Callable[..., Tensor], choose: Callable[..., Chosen]
) -> Callable[..., Selection]:
    """Bound for a layer that owns an indexer.

    Args:
        scores: the op ``indexer_logits``; it may leave what a row doesn't see unwritten.
        choose: (scores, visible, k, block_table, row_request, block_size) to ``Chosen``.
    """
    spec = layer.indexer
    if spec is None:
        raise ValueError(f"layer {layer.index} owns no indexer: it can't select")
    scale, topk = spec.scale, spec.topk

    def call(plan: StepPlan, kv: LayerKV, index_q: Tensor, index_weights: Tensor) -> Selection:
        cache = kv.index_keys
        if cache is None:
            raise ValueError(f"layer {layer.index} owns an indexer but was given no index cache")
        table, latent_table = plan.block_tables["index"], plan.block_tables["latent"]
        columns = table.shape[1] * cache.block_size
        found: list[Chosen] = []
        for rows, requests, query_start, max_rows in pieces(plan, columns):
            visible = plan.visible[rows]
            each = scores(
                index_q[rows],
                index_weights[rows],
                scale,
                cache,
                table[requests],
                query_start,
                visible,
                max_rows,
            )
            request = plan.row_request[rows]
            found.append(choose(each, visible, topk, latent_table, request, kv.latent.block_size))
        positions, lens, has_nan, slots = (
            parts[0] if len(parts) == 1 else torch.cat(parts)  # type: ignore[arg-type]
            for parts in zip(*found, strict=True)
        )
        assert positions is not None
        assert lens is not None
        assert has_nan is not None
        assert slots is not None
        return Selection(positions, lens, slots, has_nan)

    return call


def pieces(plan: StepPlan, columns: int) -> Iterator[tuple[slice, slice, Tensor, int]]:
    """Rows, requests, query_start of the piece and rows a request: each segment, cut where its
    scores would take more than ``SCORE_BYTES``. The cuts depend on the shape alone.
    """
    limit = max(1, SCORE_BYTES // (4 * max(1, columns)))
    first_row = first_request = 0
    for segment in plan.shape.segments:
        last_request = first_request + segment.requests
        start = plan.query_start[first_request : last_request + 1]
        if first_row:
            start = start - first_row
        requests = slice(first_request, last_request)
        for i in range(0, segment.rows, limit):
            j = min(i + limit, segment.rows)
            rows = slice(first_row + i, first_row + j)
            own = start if j - i == segment.rows else (start - i).clamp(0, j - i)
            yield rows, requests, own, min(segment.max_rows, j - i)
        first_row += segment.rows
        first_request = last_request
