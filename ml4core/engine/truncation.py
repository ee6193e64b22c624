"""Top-k, top-p and min-p: which tokens a draw may take.

All three keep the head of one order: likeliest first, ties to the lowest id. Probabilities are
summed as integers, so that no cut depends on the order of a sum, on the width of a search or on
the other rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ml4core.compose.ops.sampling import NEG_INF, clean, tempered
from ml4core.compose.ops.tiles import TEMP_BYTES, tile_size, tiles
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.transfers import floats, ints

WEIGHT_BITS = 40
"""The likeliest token weighs 2**40: any vocabulary's sum fits an int64, and what rounds to nothing
is less than 1e-6 of it all.
"""
SHARE_BITS = 30
ALL = 1 << SHARE_BITS
"""Top-p counts in units of 1 / ALL, rounded down."""
WIDTH = 1024
"""Tokens that are ordered at first for top-p. Most cuts lie among them, others need more."""


def row_tiles(logits: Tensor) -> Iterator[tuple[int, int]]:
    """Bounds of tiles of logits [T, vocab] for work with some ten temporaries of their size."""
    # A host is fast within its caches; a device is slow at many small launches.
    budget = TEMP_BYTES if logits.is_cpu else 8 * TEMP_BYTES
    rows, vocab = logits.shape
    return tiles(rows, tile_size(rows, 40 * vocab, budget))


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits fp32 [T, vocab], -inf where a row's top_k, top_p or min_p leaves a token out.

    The law is that at the rows' temperatures, all above 0. Min-p comes first, then top-k, then
    top-p of what they leave. NaN stays.
    """
    return torch.cat([_truncate(logits[a:b], params[a:b]) for a, b in row_tiles(logits)])


def _truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab, device = logits.shape[-1], logits.device
    usable, known = clean(logits)
    heat = _column([p.temperature for p in params], device)
    if any(p.min_p > 0 for p in params):
        # The likeliest weighs 1.
        kept = torch.exp(tempered(usable, heat)) >= _column([p.min_p for p in params], device)
        usable = torch.where(kept, usable, NEG_INF)
    cut = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1]
    if len(cut) == len(params):
        usable = _head(usable, heat, params)
    elif cut:
        rows = ints(cut, device)
        usable[rows] = _head(usable[rows], heat[rows], [params[i] for i in cut])
    return torch.where(known, usable, torch.nan)


def _head(logits: Tensor, heat: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Clean logits [T, vocab], -inf where top-k or top-p leaves a token out; all rows have one."""
    vocab, device = logits.shape[-1], logits.device
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    limit, share = ints([limits, [max(1, int(p.top_p * ALL)) for p in params]], device)
    open_ended = vocab in limits  # top-p of the whole vocabulary, its cut anywhere
    width = max([WIDTH if open_ended else 1, *(k for k in limits if k < vocab)])
    width = min(width, vocab)
    total = _weights(logits, heat).sum(-1) if open_ended else torch.zeros_like(limit)

    count, last, equals = _cut(logits, heat, limit, share, total, width)
    while open_ended and width < vocab:
        rows = (count > width).nonzero().squeeze(-1)
        if not rows.numel():
            break
        width = min(vocab, 16 * width)
        count[rows], last[rows], equals[rows] = _cut(
            logits[rows], heat[rows], limit[rows], share[rows], total[rows], width
        )

    tied = logits == last
    kept = logits >= last
    # Whether there are too many costs a wait on a device, and the rest a pass on a cpu.
    if not logits.is_cpu or bool((tied.sum(-1, keepdim=True) > equals).any()):
        kept = kept & (~tied | (tied.cumsum(-1) <= equals))
    return torch.where(kept, logits, NEG_INF)


def _cut(
    logits: Tensor, heat: Tensor, limit: Tensor, share: Tensor, total: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """How many tokens int64 [T] to keep, looking at the ``width`` likeliest; the logit fp32 [T, 1]
    of the last; and how many of that logit to keep, int64 [T, 1].

    A count above ``width`` says that they don't reach the share; the rest is then of no use.
    """
    vocab = logits.shape[-1]
    best = logits.topk(width).values
    mass = _weights(best, heat).cumsum(-1)
    limited = mass.gather(-1, (limit.clamp(max=width) - 1).unsqueeze(-1)).squeeze(-1)
    goal = _portion(torch.where(limit < vocab, limited, total), share)
    reached = 1 + (mass < goal.unsqueeze(-1)).sum(-1)
    count = torch.where(share < ALL, torch.minimum(reached, limit), limit)
    end = count.clamp(max=width).unsqueeze(-1)
    last = best.gather(-1, end - 1)
    equals = end - (best > last).sum(-1, keepdim=True)
    # Whatever is kept of what has no weight, nothing comes of it.
    return count, last, torch.where(last == NEG_INF, vocab, equals)


def _weights(logits: Tensor, heat: Tensor) -> Tensor:
    """Integer weights [T, n] of logits [T, n] that hold the row's largest."""
    return (torch.exp(tempered(logits, heat)) * 2.0**WEIGHT_BITS).to(torch.int64)


def _portion(total: Tensor, share: Tensor) -> Tensor:
    """total * share / ALL, rounded up, without overflow; total < 2**62, share <= ALL."""
    high, low = total >> SHARE_BITS, total & (ALL - 1)
    return high * share + ((low * share + ALL - 1) >> SHARE_BITS)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return floats(values, device).unsqueeze(-1)
