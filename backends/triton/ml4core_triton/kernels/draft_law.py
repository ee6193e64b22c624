"""The laws of target and drafter under a temperature, as verification needs them.

A row's logits are cut into parts: the largest of each part and the sum of weights under it are
found once; what follows puts them together where it needs them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.numeric import widen
from ml4core_triton.kernels.sample import BLOCK, better, joined, tempered, usable


@triton.jit
def _stats_kernel(
    logits, temperature, tops, places, sums, V, request_stride, row_stride, rows, each,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each part of a row [R, rows]: the largest logit, its place, and the sum of weights under
    it: grid (R rows, parts).
    """
    line, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = logits + (line // rows) * request_stride + (line % rows) * row_stride
    heat = tl.load(temperature + line // rows)
    heat = tl.where(heat > 0, heat, 1.0)
    best, best_at, total = float("-inf"), V, 0.0
    for start in range(part * each, tl.minimum(part * each + each, V), BLOCK):
        at = start + tl.arange(0, BLOCK)
        value, real = usable(base, at, V)
        before = best
        best, best_at = better(best, best_at, value, real, at, V)
        # Weights so far are worth less under a larger top.
        total = total * tl.where(before == best, 1.0, tl.exp(tempered(before, best, heat)))
        weight = tl.where(value == float("-inf"), 0.0, tl.exp(tempered(value, best, heat)))
        total += tl.sum(weight, axis=0)
    where = line * tl.num_programs(1) + part
    tl.store(tops + where, best)
    tl.store(places + where, best_at)
    tl.store(sums + where, total)


@triton.jit
def log_total(tops, places, sums, line, heat, V, PARTS: tl.constexpr):
    """A row's largest logit, its place, and the log of its weights' sum."""
    part = tl.arange(0, PARTS)
    top, place = joined(tops, places, line * PARTS, V, PARTS)
    each = tl.load(tops + line * PARTS + part)
    share = tl.where(each == float("-inf"), 0.0, tl.exp(tempered(each, top, heat)))
    total = tl.sum(tl.load(sums + line * PARTS + part) * share, axis=0)
    return top, place, tl.log(total)


@triton.jit
def log_odds(base, id, top, log_sum, heat):
    """Log probability of an id; NaN has none."""
    value = widen(tl.load(base + id))
    value = tl.where(value == value, value, float("-inf"))
    return tempered(value, top, heat) - log_sum


@triton.jit
def prefix_weight(
    logits, draft_logits, draft_ids, tops, places, sums, draft_tops, draft_places, draft_sums,
    request, count, V, request_stride, row_stride, draft_request, draft_row, heat,
    DRAFTED: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """min(.. min(p0 / q0, 1) p1 / q1 .., 1) of the first ``count`` drafts."""
    weight = 1.0
    for i in tl.static_range(DEPTH):
        ratio = log_ratio(
            logits, draft_logits, draft_ids, tops, places, sums, draft_tops, draft_places,
            draft_sums, request, i, V, request_stride, row_stride, draft_request, draft_row, heat,
            DRAFTED, DEPTH, PARTS,
        )  # fmt: skip
        weight = tl.where(i < count, tl.minimum(weight * tl.exp(ratio), 1.0), weight)
    return weight


@triton.jit
def log_ratio(
    logits, draft_logits, draft_ids, tops, places, sums, draft_tops, draft_places, draft_sums,
    request, i, V, request_stride, row_stride, draft_request, draft_row, heat,
    DRAFTED: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """log p(d) - log q(d) of draft i; -inf where p is 0."""
    id = tl.load(draft_ids + request * DEPTH + i)
    id = tl.where((id >= 0) & (id < V), id, 0)
    top, _, log_sum = log_total(tops, places, sums, request * (DEPTH + 1) + i, heat, V, PARTS)
    base = logits + request * request_stride + i * row_stride
    found = log_odds(base, id, top, log_sum, heat)
    if DRAFTED:
        top, _, log_sum = log_total(
            draft_tops, draft_places, draft_sums, request * DEPTH + i, heat, V, PARTS
        )
        base = draft_logits + request * draft_request + i * draft_row
        q = log_odds(base, id, top, log_sum, heat)
        # A draft that its own law can't give counts for nothing where the target can't say it.
        found = tl.where(found == float("-inf"), found, found - q)
    return found


def stats(
    logits: Tensor, temperature: Tensor, rows: int, parts: int, each: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tops fp32, their places int32, and sums fp32, [R rows, parts] each."""
    requests, _, vocab = logits.shape
    shape = (requests * rows, parts)
    tops, sums = (torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    places = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _stats_kernel[shape](
        logits, temperature, tops, places, sums, vocab, logits.stride(0), logits.stride(1), rows,
        each, BLOCK=BLOCK,
    )  # fmt: skip
    return tops, places, sums
