"""Log probabilities and ranks of tokens under a model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml4core.compose.ops.ordering import order_key
from ml4core.compose.ops.sampling import NEG_INF, clean, tempered
from ml4core.engine.sampler_io import Logprob
from ml4core.engine.truncation import row_tiles


class LogprobReport:
    """For each row of logits [R, vocab]: its token of ids int64 [R], and its ``counts`` likeliest.

    Nothing is waited for.

    Attributes:
        tensors: to be brought to the host.
    """

    def __init__(self, logits: Tensor, ids: Tensor, counts: Sequence[int]) -> None:
        self._counts = counts
        most = max(counts, default=0)
        tiles = [_tile(logits[a:b], ids[a:b], most) for a, b in row_tiles(logits)]
        self.tensors: list[Tensor] = [
            ids,
            *(torch.cat(parts) for parts in zip(*tiles, strict=True)),
        ]

    def entries(self, tensors: Sequence[Tensor]) -> list[dict[int, Logprob]]:
        """Of ``tensors`` on the host. The row's token comes first, then the others, likeliest
        first. NaN has probability 0.
        """
        found = []
        columns = zip(*(one.tolist() for one in tensors), self._counts, strict=True)
        for token, rank, top, value, count in columns:
            row = {token: Logprob(value[0], rank)}
            for i in range(count):
                row.setdefault(top[i], Logprob(value[i + 1], i + 1))
            found.append(row)
        return found


def _tile(logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks [R] of ids, the ``most`` likeliest [R, most], and logprobs [R, 1 + most] of both."""
    usable, _ = clean(logits)
    logprobs = torch.log_softmax(tempered(usable, usable.new_ones(1)), dim=-1)
    keys = _rank_keys(usable)
    own = ids.unsqueeze(-1)
    ranks = 1 + (keys > keys.gather(-1, own)).sum(-1)
    best = keys.topk(most).indices
    shown = torch.cat((own, best), dim=-1)
    values = logprobs.gather(-1, shown)
    # Not NaN, even if there is nothing else in the row.
    return ranks, best, torch.where(usable.gather(-1, shown) == NEG_INF, NEG_INF, values)


def _rank_keys(logits: Tensor) -> Tensor:
    """int64 keys [..., vocab] of clean logits. All differ: larger is likelier, then of lower id."""
    ids = torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    return (order_key(logits).to(torch.int64) << 32) + ids
