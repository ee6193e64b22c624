"""Logits to tokens, each row by its own request's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ml4core.api import Sampling, Verifier
from ml4core.compose.context import Ops
from ml4core.compose.contract import ContractError
from ml4core.engine.grammar_masks import constrain
from ml4core.engine.logits_processors import LogitsProcessors
from ml4core.engine.logprobs import LogprobReport
from ml4core.engine.sampler_draws import Draws
from ml4core.engine.sampler_io import Logprob, SampledToken, SamplerRow
from ml4core.engine.transfers import floats, ints
from ml4core.engine.truncation import truncate

__all__ = ["Logprob", "SampledToken", "Sampler", "SamplerRow"]


class Sampler:
    """Chooses one token for every row, or judges a window of drafts.

    A row's token depends on its logits and its ``SamplerRow`` alone, not on the other rows. In
    order: allowed ids, bias, ids forbidden by ``min_tokens``, repetition, frequency and presence
    penalty, what a grammar allows; then at temperature 0 the likeliest token, else min-p, top-k and
    top-p at the temperature and a draw. What no row asks for costs nothing. Of these only top-p
    waits for the device: how far it has to look depends on the logits.
    """

    def __init__(self, ops: Ops, vocab_size: int, backend: str = "") -> None:
        """``backend``: whose ops they are. ``origin`` then begins messages about its results."""
        self._draw = ops["sample"]
        self.origin = f"backend {backend!r}, " if backend else ""
        self._vocab = vocab_size
        self._edit = LogitsProcessors(vocab_size)

    def __call__(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[SampledToken]:
        """A token for each row of logits [J, vocab], which are not changed; NaN never wins."""
        draws = self.draw(logits, rows)
        return [
            token for each in draws.tokens([one.cpu() for one in draws.tensors]) for token in each
        ]

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Draws:
        """A token for each row of logits [J, vocab], on the device."""
        self._check(logits, len(rows))
        if not rows:
            return Draws(torch.empty(0, 1, dtype=torch.int64, device=logits.device), self._vocab)
        edited = self._edit(logits, rows) if any(row.params.edits for row in rows) else logits
        if (constraint := constrain(rows)) is not None:
            edited = constraint(edited)
        ids = self._choose(edited, rows)
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        report = None
        if asked:
            counts = [rows[i].params.logprobs or 0 for i in asked]
            own = _pick(ids.clamp(0, self._vocab - 1), asked)  # the host refuses what is none
            report = LogprobReport(_pick(logits, asked), own, counts)
        source = self.origin + "op 'sample'"
        return Draws(ids.unsqueeze(-1), self._vocab, None, asked, report, source=source)

    @torch.inference_mode()
    def verify(
        self,
        logits: Tensor,
        rows: Sequence[SamplerRow],
        judge: Verifier,
        draft_ids: Tensor,
        draft_logits: Tensor | None,
        most: Sequence[int] | None = None,
    ) -> Draws:
        """Judges a window of drafts a row: logits [R Q, vocab] of its rows, draft_ids [R, Q-1], -1
        where there is none, and draft_logits as ``Verifier`` has them. ``most``: of each row its
        drafts and one, None: Q.

        Each row of a window counts the drafts before it as its sequence's tokens.
        """
        width = draft_ids.shape[1] + 1
        self._check(logits, len(rows) * width)
        whole = list(
            chain.from_iterable(
                row.window(width) if row.params.edits else [row] * width for row in rows
            )
        )
        edited = self._edit(logits, whole) if any(row.params.edits for row in rows) else logits
        if (constraint := constrain(rows, width)) is not None:
            edited = constraint(edited)
        newest = [len(row.prompt_ids) + len(row.output_ids) - 1 for row in rows]
        sampling = self._sampling(rows, newest, logits.device)
        ids, counts = judge(self._cut(edited, whole), sampling, draft_ids, draft_logits)
        found = (tuple(ids.shape), ids.dtype, tuple(counts.shape), counts.dtype)
        source = self.origin + "stage 'verify_and_sample'"
        if found != (wanted := ((len(rows), width), torch.int64, (len(rows),), torch.int64)):
            raise ContractError(f"{source} returned {found}; wanted: {wanted}")
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        report = None
        if asked:
            at = [i * width + j for i in asked for j in range(width)]
            top = [rows[i].params.logprobs or 0 for i in asked for _ in range(width)]
            own = _pick(ids.clamp(0, self._vocab - 1).flatten(), at)  # -1 behind what is emitted
            report = LogprobReport(_pick(logits, at), own, top)
        return Draws(ids, self._vocab, counts, asked, report, source=source, most=most)

    @torch.inference_mode()
    def report(self, logits: Tensor, next_ids: Sequence[int], k: int) -> LogprobReport:
        """For each row of logits [T, vocab], the token that follows it and the ``k`` likeliest."""
        self._check(logits, len(next_ids))
        return LogprobReport(logits, ints(next_ids, logits.device), [k] * len(next_ids))

    def prompt_logprobs(
        self, logits: Tensor, next_ids: Sequence[int], k: int
    ) -> list[dict[int, Logprob]]:
        """The same on the host."""
        self._check(logits, len(next_ids))
        if not next_ids:
            return []
        report = self.report(logits, next_ids, k)
        return report.entries([one.cpu() for one in report.tensors])

    def _check(self, logits: Tensor, rows: int) -> None:
        if tuple(logits.shape) != (rows, self._vocab):
            raise ValueError(
                f"logits {tuple(logits.shape)}: {rows} rows of {self._vocab} are wanted"
            )

    def _choose(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Ids int64 [J] of edited logits [J, vocab]."""
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        if not drawn:
            return likeliest(logits)
        if len(drawn) == len(rows):
            return self._sample(logits, rows)
        # The noise of a row costs far more than its maximum, so only rows that need it get it.
        greedy = [i for i, row in enumerate(rows) if row.params.temperature == 0]
        order = ints([*greedy, *drawn], logits.device)
        found = torch.cat(
            (
                likeliest(logits[order[: len(greedy)]]),
                self._sample(logits[order[len(greedy) :]], [rows[i] for i in drawn]),
            )
        )
        return torch.empty_like(found).index_copy_(0, order, found)

    def _sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Ids int64 [J] drawn from edited logits [J, vocab] at temperatures above 0."""
        sampling = self._sampling(rows, [row.position for row in rows], logits.device)
        ids: Tensor = self._draw(self._cut(logits, rows), *sampling)
        found, wanted = (tuple(ids.shape), ids.dtype), ((len(rows),), torch.int64)
        if found != wanted:
            raise ContractError(
                f"{self.origin}op 'sample' returned shape and dtype {found}; wanted: {wanted}"
            )
        return ids

    def _cut(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Logits [J, vocab], -inf where a row's top-k, top-p or min-p leaves a token out."""
        cut = [i for i, row in enumerate(rows) if row.params.truncates]
        if not cut:
            return logits
        head = truncate(_pick(logits, cut), [rows[i].params for i in cut])
        if len(cut) == len(rows):
            return head
        return logits.to(torch.float32, copy=True).index_copy_(0, ints(cut, logits.device), head)

    @staticmethod
    def _sampling(
        rows: Sequence[SamplerRow], positions: Sequence[int], device: torch.device
    ) -> Sampling:
        numbers = ints([[row.seed for row in rows], positions], device)
        return Sampling(floats([row.params.temperature for row in rows], device), *numbers)


def likeliest(logits: Tensor) -> Tensor:
    """The lowest id int64 [J] of the largest of logits [J, vocab], which is not NaN."""
    # argmax takes NaN for the largest, and the first of equals.
    usable = torch.nan_to_num(logits, nan=float("-inf"), posinf=float("inf"))
    return usable.argmax(-1)


def _pick(x: Tensor, rows: Sequence[int]) -> Tensor:
    """x[rows], ascending; no copy if that is all of it."""
    if len(rows) == x.shape[0]:
        return x
    return x[ints(rows, x.device)]
