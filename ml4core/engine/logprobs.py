"""Log probabilities and ranks of tokens under a model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml4core.compose.ops.ordering import order_key
from ml4core.compose.ops.sampling import NEG_INF, clean, tempered
from ml4core.engine.sampler_io import Logprob
from ml4core.engine.truncation import row_tiles


def token_logprobs(logits: Tensor, ids: Tensor, counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """For each row of logits [R, vocab]: its token of ids int64 [R], and its ``counts`` likeliest.

    The row's token comes first, then the others, likeliest first. NaN has probability 0.
    """
    found: list[dict[int, Logprob]] = []
    for a, b in row_tiles(logits):
        found += _tile(logits[a:b], ids[a:b], counts[a:b])
    return found


def _tile(logits: Tensor, ids: Tensor, counts: Sequence[int]) -> list[dict[int, Logprob]]:
    usable, _ = clean(logits)
    logprobs = torch.log_softmax(tempered(usable, usable.new_ones(1)), dim=-1)
    keys = _rank_keys(usable)
    own = ids.unsqueeze(-1)
    ranks = 1 + (keys > keys.gather(-1, own)).sum(-1)
    best = keys.topk(max(counts, default=0)).indices
    shown = torch.cat((own, best), dim=-1)
    values = logprobs.gather(-1, shown)
    # Not NaN, even if there is nothing else in the row.
    values = torch.where(usable.gather(-1, shown) == NEG_INF, NEG_INF, values)

    result = []
    columns = zip(ids.tolist(), ranks.tolist(), best.tolist(), values.tolist(), counts, strict=True)
    for token, rank, top, value, count in columns:
        row = {token: Logprob(value[0], rank)}
        for i in range(count):
            row.setdefault(top[i], Logprob(value[i + 1], i + 1))
        result.append(row)
    return result


def _rank_keys(logits: Tensor) -> Tensor:
    """int64 keys [..., vocab] of clean logits. All differ: larger is likelier, then of lower id."""
    ids = torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    return (order_key(logits).to(torch.int64) << 32) + ids
