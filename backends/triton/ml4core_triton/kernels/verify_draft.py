"""``verify_draft``: rejection sampling of drafts, one by one or as a block.

Rate model: target and draft logits are read three times, from memory once: 4 rows of 131,072 in
fp32 with 3 of the drafter are 3.7 MB, 0.9 us, so the launches count: the stats of each row (largest
logit, sum of weights), what a block leaves over (blocks only), the decision, the draw of the one
token that follows, and its choice. Each row is cut into parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.draft_law import log_ratio, log_total, prefix_weight, stats
from ml4core_triton.kernels.noise import ACCEPT, DRAW, RESIDUAL, gumbel, row_key, uniform
from ml4core_triton.kernels.sample import BLOCK, better, joined, parts_of, sample, tempered, usable

_DRAW, _ACCEPT, _RESIDUAL = (tl.constexpr(one) for one in (DRAW, ACCEPT, RESIDUAL))


@triton.jit
def _leftover_kernel(
    logits, draft_logits, draft_ids, temperature, tops, places, sums, draft_tops, draft_places,
    draft_sums, left, V, request_stride, row_stride, draft_request, draft_row, each,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over a part of max(w p - q, 0), with w the weight of the prefix before: grid
    (R DEPTH, parts).
    """
    line, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, place = line // DEPTH, line % DEPTH
    heat = tl.load(temperature + request)
    heat = tl.where(heat > 0, heat, 1.0)
    weight = prefix_weight(
        logits, draft_logits, draft_ids, tops, places, sums, draft_tops, draft_places, draft_sums,
        request, place, V, request_stride, row_stride, draft_request, draft_row, heat, True, DEPTH,
        PARTS,
    )  # fmt: skip
    top, _best, log_sum = log_total(
        tops, places, sums, request * (DEPTH + 1) + place, heat, V, PARTS
    )
    draft_top, _draft_best, draft_total = log_total(
        draft_tops, draft_places, draft_sums, line, heat, V, PARTS
    )
    base = logits + request * request_stride + place * row_stride
    draft_base = draft_logits + request * draft_request + place * draft_row
    total = 0.0
    for start in range(part * each, tl.minimum(part * each + each, V), BLOCK):
        at = start + tl.arange(0, BLOCK)
        value, _real = usable(base, at, V)
        draft, _draft_real = usable(draft_base, at, V)
        odds = tl.exp(tempered(value, top, heat) - log_sum) * weight
        rest = odds - tl.exp(tempered(draft, draft_top, heat) - draft_total)
        total += tl.sum(tl.where(at < V, tl.maximum(rest, 0.0), 0.0), axis=0)
    tl.store(left + line * PARTS + part, total)


@triton.jit
def _decide_kernel(
    logits, draft_logits, draft_ids, temperature, seeds, positions, tops, places, sums, draft_tops,
    draft_places, draft_sums, left, ids, counts, rejected, weights, V, request_stride, row_stride,
    draft_request, draft_row,
    DRAFTED: tl.constexpr, BLOCKED: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """How many drafts are kept, and what weighs p in the law of the next token: grid (R,)."""
    request = tl.program_id(0).to(tl.int64)
    warm = tl.load(temperature + request) > 0
    heat = tl.where(warm, tl.load(temperature + request), 1.0)
    seed, position = tl.load(seeds + request), tl.load(positions + request)
    going, given_so_far, kept, same = 1, 1, 0, 0
    whole, kept_weight = 1.0, 1.0
    for i in tl.static_range(DEPTH):
        id = tl.load(draft_ids + request * DEPTH + i)
        given = ((id >= 0) & (id < V)).to(tl.int32)
        given_so_far = given_so_far * given
        _, best, _ = log_total(tops, places, sums, request * (DEPTH + 1) + i, heat, V, PARTS)
        going = going * given * (tl.minimum(best, V - 1) == id).to(tl.int32)
        same += going
        ratio = log_ratio(
            logits, draft_logits, draft_ids, tops, places, sums, draft_tops, draft_places,
            draft_sums, request, i, V, request_stride, row_stride, draft_request, draft_row, heat,
            DRAFTED, DEPTH, PARTS,
        )  # fmt: skip
        if BLOCKED:
            whole = tl.minimum(whole * tl.exp(ratio), 1.0)
            # The chance of stopping after i + 1 drafts: that of the prefix, if none follows.
            chance = whole
            if i + 1 < DEPTH:
                follows = tl.load(draft_ids + request * DEPTH + i + 1)
                if DRAFTED:
                    line = (request * DEPTH + i + 1) * PARTS
                    rest = tl.sum(tl.load(left + line + tl.arange(0, PARTS)), axis=0)
                else:
                    after = log_ratio(
                        logits, draft_logits, draft_ids, tops, places, sums, draft_tops,
                        draft_places, draft_sums, request, i + 1, V, request_stride, row_stride,
                        draft_request, draft_row, heat, DRAFTED, DEPTH, PARTS,
                    )  # fmt: skip
                    rest = whole * (1.0 - tl.exp(after))
                room = rest + 1.0 - whole
                stop = tl.where(room > 0, tl.fdiv(rest, tl.where(room > 0, room, 1.0)), 0.0)
                chance = tl.where((follows >= 0) & (follows < V), stop, whole)
            bar = uniform(row_key(seed, position, _ACCEPT), i)
            lucky = (given_so_far == 1) & (bar < chance)
            kept = tl.where(lucky, i + 1, kept)
            kept_weight = tl.where(lucky, whole, kept_weight)
        else:
            bar = tl.log(uniform(row_key(seed, position + i, _ACCEPT), 0))
            given_so_far = given_so_far * (bar < ratio).to(tl.int32)
            kept += given_so_far
    kept = tl.where(warm, kept, same)
    tl.store(counts + request, (kept + 1).to(tl.int64))
    tl.store(weights + request, kept_weight)
    follows = tl.load(draft_ids + request * DEPTH + tl.minimum(kept, DEPTH - 1))
    broke = (kept < DEPTH) & (follows >= 0) & (follows < V)
    tl.store(rejected + request, broke.to(tl.int32))
    for i in tl.static_range(DEPTH):
        id = tl.load(draft_ids + request * DEPTH + i)
        tl.store(ids + request * (DEPTH + 1) + i, tl.where(i < kept, id, -1))
    tl.store(ids + request * (DEPTH + 1) + DEPTH, -1)


@triton.jit
def _draw_kernel(
    logits, draft_logits, draft_ids, temperature, seeds, positions, tops, places, sums, draft_tops,
    draft_places, draft_sums, counts, rejected, weights, scores, found, V, request_stride,
    row_stride, draft_request, draft_row, each,
    DRAFTED: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best noisy score of a part, of the target's law [0] and of the residual [1]: grid
    (R, parts). A residual without weight has no place.
    """
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kept = tl.load(counts + request) - 1
    broke = tl.load(rejected + request) > 0
    heat = tl.load(temperature + request)
    plain, plain_at = float("-inf"), V
    rest, rest_at = float("-inf"), V
    if heat > 0:
        line = request * (DEPTH + 1) + kept
        top, _place, log_sum = log_total(tops, places, sums, line, heat, V, PARTS)
        judged = tl.minimum(kept, DEPTH - 1)
        draft = tl.load(draft_ids + request * DEPTH + judged)
        draft_base = draft_logits
        draft_top, draft_total = 0.0, 0.0
        if DRAFTED:
            draft_base += request * draft_request + judged * draft_row
            draft_top, _draft_place, draft_total = log_total(
                draft_tops, draft_places, draft_sums, request * DEPTH + judged, heat, V, PARTS
            )
        weight = tl.load(weights + request)
        seed, position = tl.load(seeds + request), tl.load(positions + request) + kept
        key, rest_key = row_key(seed, position, _DRAW), row_key(seed, position, _RESIDUAL)
        base = logits + request * request_stride + kept * row_stride
        for start in range(part * each, tl.minimum(part * each + each, V), BLOCK):
            at = start + tl.arange(0, BLOCK)
            value, real = usable(base, at, V)
            score = tempered(value, top, heat)
            plain, plain_at = better(plain, plain_at, score + gumbel(key, at), real, at, V)
            if broke:
                if DRAFTED:
                    q, _q_real = usable(draft_base, at, V)
                    odds = tl.exp(score - log_sum) * weight
                    odds = odds - tl.exp(tempered(q, draft_top, heat) - draft_total)
                    there = real & (odds > 0)
                    residual = tl.log(tl.where(there, odds, 1.0))
                else:
                    there = real & (at != draft) & (score > float("-inf"))
                    residual = score
                noisy = residual + gumbel(rest_key, at)
                rest, rest_at = better(rest, rest_at, noisy, there, at, V)
    where = request * PARTS + part
    tl.store(scores + where, plain)
    tl.store(found + where, plain_at)
    behind = tl.num_programs(0).to(tl.int64) * PARTS
    tl.store(scores + behind + where, rest)
    tl.store(found + behind + where, rest_at)


@triton.jit
def _finish_kernel(
    temperature, tops, places, counts, rejected, scores, found, ids, V,
    DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The token behind the kept drafts: grid (R,)."""
    request = tl.program_id(0).to(tl.int64)
    kept = tl.load(counts + request) - 1
    line = (request * (DEPTH + 1) + kept) * PARTS
    _, cold = joined(tops, places, line, V, PARTS)
    _, drawn = joined(scores, found, request * PARTS, V, PARTS)
    behind = tl.num_programs(0).to(tl.int64) * PARTS
    _, rest = joined(scores + behind, found + behind, request * PARTS, V, PARTS)
    # The residual is empty if the two laws are equal but for rounding.
    drawn = tl.where((tl.load(rejected + request) > 0) & (rest < V), rest, drawn)
    last = tl.where(tl.load(temperature + request) > 0, drawn, cold)
    tl.store(ids + request * (DEPTH + 1) + kept, tl.minimum(last, V - 1).to(tl.int64))


def verify_draft(
    logits: Tensor,
    draft_ids: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    block: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids int64 [R, Q], -1 behind the emitted ones, and counts int64 [R] of emitted tokens.

    Row i of logits [R, Q, vocab] judges draft i of draft_ids [R, Q-1] and stands at position
    positions[r] + i. draft_logits are those before the temperature.
    """
    requests, depth = draft_ids.shape
    vocab = logits.shape[-1]
    if depth == 0:
        ids = sample(logits[:, 0], temperature, seeds, positions)
        return ids.unsqueeze(-1), torch.ones_like(ids)
    ids = torch.empty(requests, depth + 1, dtype=torch.int64, device=logits.device)
    counts = torch.empty(requests, dtype=torch.int64, device=logits.device)
    if not requests:
        return ids, counts
    draft_ids, temperature = draft_ids.contiguous(), temperature.contiguous()
    seeds, positions = seeds.contiguous(), positions.contiguous()
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    drafted = draft_logits is not None
    drafts = logits if draft_logits is None else draft_logits
    drafts = drafts if drafts.stride(-1) == 1 else drafts.contiguous()
    parts, each = parts_of(vocab, requests * (depth + 1))
    target = stats(logits, temperature, depth + 1, parts, each)
    draft = stats(drafts, temperature, depth, parts, each) if drafted else target
    strides = (logits.stride(0), logits.stride(1), drafts.stride(0), drafts.stride(1))
    left = logits.new_empty(requests, depth, parts, dtype=torch.float32)
    if block and drafted:
        _leftover_kernel[(requests * depth, parts)](
            logits, drafts, draft_ids, temperature, *target, *draft, left, vocab, *strides, each,
            DEPTH=depth, PARTS=parts, BLOCK=BLOCK,
        )  # fmt: skip
    rejected = torch.empty(requests, dtype=torch.int32, device=logits.device)
    weights = logits.new_empty(requests, dtype=torch.float32)
    _decide_kernel[(requests,)](
        logits, drafts, draft_ids, temperature, seeds, positions, *target, *draft, left, ids,
        counts, rejected, weights, vocab, *strides,
        DRAFTED=drafted, BLOCKED=bool(block), DEPTH=depth, PARTS=parts, num_warps=1,
    )  # fmt: skip
    scores = logits.new_empty(2, requests, parts, dtype=torch.float32)
    found = torch.empty(2, requests, parts, dtype=torch.int32, device=logits.device)
    _draw_kernel[(requests, parts)](
        logits, drafts, draft_ids, temperature, seeds, positions, *target, *draft, counts,
        rejected, weights, scores, found, vocab, *strides, each,
        DRAFTED=drafted, DEPTH=depth, PARTS=parts, BLOCK=BLOCK,
    )  # fmt: skip
    _finish_kernel[(requests,)](
        temperature, target[0], target[1], counts, rejected, scores, found, ids, vocab,
        DEPTH=depth, PARTS=parts, num_warps=1,
    )  # fmt: skip
    return ids, counts
