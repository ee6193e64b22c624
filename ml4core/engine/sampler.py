"""Logits to tokens, each row by its own request's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml4core.compose.context import Ops
from ml4core.engine.logits_processors import LogitsProcessors
from ml4core.engine.logprobs import token_logprobs
from ml4core.engine.sampler_io import Logprob, SampledToken, SamplerRow
from ml4core.engine.truncation import truncate

__all__ = ["Logprob", "SampledToken", "Sampler", "SamplerRow"]


class Sampler:
    """Chooses one token for every row.

    A row's token depends on its logits and its ``SamplerRow`` alone, not on the other rows. In
    order: allowed ids, bias, ids forbidden by ``min_tokens``, repetition, frequency and presence
    penalty; then at temperature 0 the likeliest token, else min-p, top-k and top-p at the
    temperature and a draw. What no row asks for costs nothing.
    """

    def __init__(self, ops: Ops, vocab_size: int) -> None:
        self._draw = ops["sample"]
        self._vocab = vocab_size
        self._edit = LogitsProcessors(vocab_size)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[SampledToken]:
        """A token for each row of logits [J, vocab], which are not changed; NaN never wins."""
        self._check(logits, len(rows))
        if not rows:
            return []
        edited = self._edit(logits, rows) if any(row.params.edits for row in rows) else logits
        ids = self._choose(edited, rows)
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not asked:
            return [SampledToken(token, None) for token in self._tokens(ids)]
        tokens = self._tokens(ids)
        counts = [rows[i].params.logprobs or 0 for i in asked]
        found = token_logprobs(_pick(logits, asked), _pick(ids, asked), counts)
        of = dict(zip(asked, found, strict=True))
        return [SampledToken(token, of.get(i)) for i, token in enumerate(tokens)]

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, next_ids: Sequence[int], k: int
    ) -> list[dict[int, Logprob]]:
        """For each row of logits [T, vocab], the token that follows it and the ``k`` likeliest."""
        self._check(logits, len(next_ids))
        if not next_ids:
            return []
        ids = torch.tensor(next_ids, dtype=torch.int64, device=logits.device)
        return token_logprobs(logits, ids, [k] * len(next_ids))

    def _check(self, logits: Tensor, rows: int) -> None:
        if tuple(logits.shape) != (rows, self._vocab):
            raise ValueError(
                f"logits {tuple(logits.shape)}: {rows} rows of {self._vocab} are wanted"
            )

    def _tokens(self, ids: Tensor) -> list[int]:
        """The ids on the host. Those of the ``sample`` op are a backend's, and index its next
        step's embedding.
        """
        tokens: list[int] = ids.tolist()
        if not 0 <= min(tokens) <= max(tokens) < self._vocab:
            bad = next(token for token in tokens if not 0 <= token < self._vocab)
            raise ValueError(f"op sample drew {bad}; ids are 0 to {self._vocab - 1}")
        return tokens

    def _choose(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Ids int64 [J] of edited logits [J, vocab]."""
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        if not drawn:
            return likeliest(logits)
        if len(drawn) == len(rows):
            return self._sample(logits, rows)
        # The noise of a row costs far more than its maximum, so only rows that need it get it.
        greedy = [i for i, row in enumerate(rows) if row.params.temperature == 0]
        ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        ids[greedy] = likeliest(_pick(logits, greedy))
        ids[drawn] = self._sample(_pick(logits, drawn), [rows[i] for i in drawn])
        return ids

    def _sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Ids int64 [J] drawn from edited logits [J, vocab] at temperatures above 0."""
        cut = [i for i, row in enumerate(rows) if row.params.truncates]
        if cut:
            head = truncate(_pick(logits, cut), [rows[i].params for i in cut])
            if len(cut) == len(rows):
                logits = head
            else:
                logits = logits.to(torch.float32, copy=True)
                logits[cut] = head
        device = logits.device
        temperature = torch.tensor(
            [row.params.temperature for row in rows], dtype=torch.float32, device=device
        )
        seeds = torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device)
        positions = torch.tensor([row.position for row in rows], dtype=torch.int64, device=device)
        ids: Tensor = self._draw(logits, temperature, seeds, positions)
        found, wanted = (tuple(ids.shape), ids.dtype), ((len(rows),), torch.int64)
        if found != wanted:
            raise ValueError(f"op sample returned shape and dtype {found}; wanted: {wanted}")
        return ids


def likeliest(logits: Tensor) -> Tensor:
    """The lowest id int64 [J] of the largest of logits [J, vocab], which is not NaN."""
    # argmax takes NaN for the largest, and the first of equals.
    usable = torch.nan_to_num(logits, nan=float("-inf"), posinf=float("inf"))
    return usable.argmax(-1)


def _pick(x: Tensor, rows: Sequence[int]) -> Tensor:
    """x[rows], ascending; no copy if that is all of it."""
    if len(rows) == x.shape[0]:
        return x
    return x[torch.tensor(rows, device=x.device)]
