"""Drawing tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.compose.ops.noise import DRAW, gumbel, row_keys
from ml4core.compose.ops.ordering import first_argmax
from ml4core.compose.ops.tiles import tile_size, tiles

NEG_INF = float("-inf")


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Token ids int64 [T] of logits [T, vocab]; temperature, seeds and positions are [T]."""
    rows, vocab = logits.shape
    keys = row_keys(seeds, positions, DRAW)
    ids = []
    for a, b in tiles(rows, tile_size(rows, 40 * vocab)):
        usable, allowed = clean(logits[a:b])
        scores = tempered(usable, temperature[a:b].unsqueeze(-1))
        drawn = draw(scores, allowed, keys[a:b])
        ids.append(torch.where(temperature[a:b] > 0, drawn, first_argmax(usable, allowed)))
    return torch.cat(ids)


def clean(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits fp32 [..., vocab] with -inf for NaN, and which are not NaN."""
    wide = logits.to(torch.float32)
    allowed = ~torch.isnan(wide)
    return torch.where(allowed, wide, NEG_INF), allowed


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log weights [..., vocab], at most 0, of clean logits at temperature [..., 1].

    A temperature that is not above 0 counts as 1. If +inf is among the logits, only it has weight.
    """
    top = logits.amax(-1, keepdim=True)
    # Shifted first, so that no temperature overflows.
    shifted = logits - torch.where(top == NEG_INF, 0.0, top)
    shifted = torch.where(logits == top, 0.0, shifted)
    scores = shifted / torch.where(temperature > 0, temperature, 1.0)
    return torch.where(logits == NEG_INF, NEG_INF, scores)


def draw(scores: Tensor, allowed: Tensor, keys: Tensor) -> Tensor:
    """Ids int64 [T] drawn in proportion to exp(scores) [T, vocab], by noise of keys [T]."""
    return first_argmax(scores + gumbel(keys, scores.shape[-1]), allowed)
