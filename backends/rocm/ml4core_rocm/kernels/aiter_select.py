"""The stage ``select`` by AITER: scores, then its stable top-k. Decodes and verify windows read
keys from their pages; rows of prompts score keys that are gathered first, request after request.

How many keys are gathered only the device knows. Memory is for as many as the pages of some
requests hold, which are worked on in turn, and some rows of theirs: with the scores it stays within
what is reserved for a selection, half a GiB.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, LayerSpec, Selection, StepPlan
from ml4core_rocm.kernels.aiter_logits import gathered_keys, paged_scores, run_scores
from ml4core_rocm.kernels.aiter_topk import topk_rows, topk_windows
from ml4core_rocm.kernels.slot_streams import starts_of
from ml4core_triton.kernels.to_slots import to_slots

KEY_BYTES = 132 << 20
"""Bound of the keys that are gathered at once: a request of a million tokens. One whose pages hold
more is gathered alone."""
SCORE_BYTES = (512 << 20) - KEY_BYTES
"""Bound of the scores that are held at once; those of one row, or one window, may be more."""

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
            table, visible = plan.block_tables["index"][requests], plan.visible[rows]
            if row >= plan.shape.rows - plan.shape.prefill.rows:
                # Rows behind those of the last request belong to none, and see nothing.
                owner = (plan.row_request[rows] - request).clamp(0, segment.requests - 1)
                found.append(_prompts(q, weights, scale, cache, table, owner, visible))
            else:
                each = segment.max_rows
                found += _windows(q, weights, scale, cache, table, visible, each)
            row, request = rows.stop, requests.stop
        positions, lens, has_nan = _joined(found)
        slots = to_slots(
            positions, plan.block_tables["latent"], plan.row_request, kv.latent.block_size
        )
        return Selection(positions, lens, slots, has_nan)

    return call


def _windows(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    table: Tensor,
    visible: Tensor,
    each: int,
) -> list[Chosen]:
    """What rows of the decode or the verify segment choose, ``each`` a request, in their order."""
    count, pages = table.shape
    step = max(1, SCORE_BYTES // (4 * max(1, each * pages * cache.block_size)))
    found = []
    for i in range(0, count, step):
        rows = slice(i * each, (i + step) * each)
        own = visible[rows]
        scores = paged_scores(q[rows], weights[rows], scale, cache, table[i : i + step], own, each)
        found.append(topk_windows(scores, own, each))
    return found


def _prompts(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    table: Tensor,
    owner: Tensor,
    visible: Tensor,
) -> Chosen:
    """What each row of the prefill segment chooses; ``owner`` int64 [T], its request's place in
    ``table``.
    """
    count, pages = table.shape
    longest = pages * cache.block_size
    lengths = visible.new_zeros(count).scatter_reduce(0, owner, visible, "amax")
    together = max(1, KEY_BYTES // (longest * cache.layout.bytes_per_token))
    found: Chosen | None = None
    for first in range(0, count, together):
        starts = starts_of(lengths[first : first + together])
        here = len(starts) - 1
        pages_of = table[first : first + together]
        gathered = gathered_keys(cache, pages_of, starts, here * longest, longest)
        # Which rows are of these requests only the device knows. The others' runs are empty.
        inside = (owner >= first) & (owner < first + here)
        begins = torch.where(inside, starts[(owner - first).clamp(0, here - 1)], 0)
        ends = begins + torch.where(inside, visible, 0)
        chosen = _chosen(q, weights, scale, gathered, begins, ends, longest)
        found = chosen if found is None else _merged(found, chosen)
    assert found is not None  # a segment with rows has requests
    return found


def _chosen(
    q: Tensor,
    weights: Tensor,
    scale: float,
    gathered: tuple[Tensor, Tensor],
    begins: Tensor,
    ends: Tensor,
    longest: int,
) -> Chosen:
    """What rows choose in runs of ``gathered``, some rows at a time."""
    step = max(1, SCORE_BYTES // (4 * len(gathered[1])))
    found: list[Chosen] = []
    for i in range(0, len(begins), step):
        part = slice(i, i + step)
        runs = begins[part], ends[part]
        scores = run_scores(q[part], weights[part], scale, gathered, *runs)
        found.append(topk_rows(scores, *runs, longest))
    return _joined(found)


def _merged(one: Chosen, other: Chosen) -> Chosen:
    """Of two in which a row chooses nothing in one: -1 alone, and 0 of them."""
    positions = torch.maximum(one[0], other[0])
    return positions, torch.maximum(one[1], other[1]), one[2] | other[2]


def _joined(parts: list[Chosen]) -> Chosen:
    """Of rows one after the other."""
    positions, lens, has_nan = (torch.cat(one) for one in zip(*parts, strict=True))
    return positions, lens, has_nan
