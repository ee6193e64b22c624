"""``sample``: the largest logit, or a draw by Gumbel noise.

Rate model: logits are read twice, the first time from memory: one row of 131,072 in fp32 is 0.5 MB,
0.12 us, so three launches count. A row is cut into parts, so that one row keeps the device busy.
Noise costs some 40 integer instructions a logit: 64 rows of 131,072 about 20 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.noise import DRAW, gumbel, row_key
from ml4core_triton.kernels.numeric import next_power, widen

_DRAW = tl.constexpr(DRAW)
BLOCK = 1024
"""Logits of a turn."""


@triton.jit
def usable(logits, at, V):
    """Logits fp32 at [BLOCK] of a row, -inf for NaN and behind the end; and which are numbers."""
    value = widen(tl.load(logits + at, mask=at < V, other=float("-inf")))
    real = (at < V) & (value == value)
    return tl.where(real, value, float("-inf")), real


@triton.jit
def tempered(value, top, heat):
    """Log weights at most 0: shifted first, so that no temperature overflows; +inf alone counts."""
    shifted = tl.where(value == top, 0.0, value - tl.where(top == float("-inf"), 0.0, top))
    return tl.where(value == float("-inf"), float("-inf"), shifted / heat)


@triton.jit
def better(best, best_at, score, real, at, V):
    """The larger of a running best and a block's, ties to the lowest index; V is none."""
    top = tl.max(tl.where(real, score, float("-inf")), axis=0)
    first = tl.min(tl.where(real & (score == top), at, V), axis=0)
    wins = (first < V) & ((best_at >= V) | (top > best) | ((top == best) & (first < best_at)))
    return tl.where(wins, top, best), tl.where(wins, first, best_at)


@triton.jit
def joined(scores, places, base, V, PARTS: tl.constexpr):
    """The best of the parts at ``base``: score and place."""
    part = tl.arange(0, PARTS)
    score, place = tl.load(scores + base + part), tl.load(places + base + part)
    top = tl.max(tl.where(place < V, score, float("-inf")), axis=0)
    return top, tl.min(tl.where((score == top) & (place < V), place, V), axis=0)


@triton.jit
def _top_kernel(logits, scores, places, V, row_stride, each, BLOCK: tl.constexpr):
    """The largest logit of each part of a row: grid (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, best_at = float("-inf"), V
    for start in range(part * each, tl.minimum(part * each + each, V), BLOCK):
        at = start + tl.arange(0, BLOCK)
        value, real = usable(logits + row * row_stride, at, V)
        best, best_at = better(best, best_at, value, real, at, V)
    where = row * tl.num_programs(1) + part
    tl.store(scores + where, best)
    tl.store(places + where, best_at)


@triton.jit
def _draw_kernel(
    logits, temperature, seeds, positions, tops, top_places, scores, places, V, row_stride, each,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best noisy score of each part of a row: grid (rows, parts). Cold rows are left out."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    best, best_at = float("-inf"), V
    if heat > 0:
        top, _ = joined(tops, top_places, row * PARTS, V, PARTS)
        key = row_key(tl.load(seeds + row), tl.load(positions + row), _DRAW)
        for start in range(part * each, tl.minimum(part * each + each, V), BLOCK):
            at = start + tl.arange(0, BLOCK)
            value, real = usable(logits + row * row_stride, at, V)
            score = tempered(value, top, heat) + gumbel(key, at)
            best, best_at = better(best, best_at, score, real, at, V)
    where = row * PARTS + part
    tl.store(scores + where, best)
    tl.store(places + where, best_at)


@triton.jit
def _pick_kernel(
    temperature, tops, top_places, scores, places, ids, V, PARTS: tl.constexpr
):  # fmt: skip
    """Grid (rows,). A row without a number gives the last id, as core's own op does."""
    row = tl.program_id(0).to(tl.int64)
    _, cold = joined(tops, top_places, row * PARTS, V, PARTS)
    _, warm = joined(scores, places, row * PARTS, V, PARTS)
    found = tl.where(tl.load(temperature + row) > 0, warm, cold)
    tl.store(ids + row, tl.minimum(found, V - 1).to(tl.int64))


def parts_of(vocab: int, rows: int) -> tuple[int, int]:
    """How many parts a row is cut into, and how many logits each has."""
    most = 64 if rows < 16 else 8
    count = min(most, next_power(triton.cdiv(vocab, 4 * BLOCK)))
    return count, triton.cdiv(triton.cdiv(vocab, count), BLOCK) * BLOCK


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Token ids int64 [T] of logits [T, vocab]; temperature, seeds and positions are [T]."""
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return ids
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    parts, each = parts_of(vocab, rows)
    scores = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(2, rows, parts, dtype=torch.int32, device=logits.device)
    temperature = temperature.contiguous()
    stride = logits.stride(0)
    _top_kernel[(rows, parts)](logits, scores[0], places[0], vocab, stride, each, BLOCK=BLOCK)
    _draw_kernel[(rows, parts)](
        logits, temperature, seeds.contiguous(), positions.contiguous(), scores[0], places[0],
        scores[1], places[1], vocab, stride, each, PARTS=parts, BLOCK=BLOCK,
    )  # fmt: skip
    _pick_kernel[(rows,)](
        temperature, scores[0], places[0], scores[1], places[1], ids, vocab, PARTS=parts,
        num_warps=1,
    )  # fmt: skip
    return ids
