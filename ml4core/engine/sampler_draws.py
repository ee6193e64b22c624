"""Tokens that were drawn on the device, and how they are told on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml4core.compose.contract import ContractError
from ml4core.engine.logprobs import LogprobReport
from ml4core.engine.sampler_io import SampledToken


class Draws:
    """What a call of the sampler gave, still on the device.

    Attributes:
        ids: [R, Q] int64, -1 behind the emitted tokens.
        counts: [R] int64, emitted tokens; None: one each.
        tensors: to be brought to the host, for ``tokens``.
    """

    def __init__(
        self,
        ids: Tensor,
        vocab_size: int,
        counts: Tensor | None = None,
        asked: Sequence[int] = (),
        report: LogprobReport | None = None,
        *,
        source: str = "op 'sample'",
        most: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            report: of every one of the Q rows of each of the requests in ``asked``.
            source: who drew, for messages.
            most: of each request the tokens that it may emit: its drafts and one; None: Q.
        """
        self.ids = ids
        self.counts = counts
        self._vocab = vocab_size
        self._asked = asked
        self._report = report
        self._source = source
        self._most = most
        self.tensors = [ids]
        if counts is not None:
            self.tensors.append(counts)
        if report is not None:
            self.tensors += report.tensors

    def tokens(self, tensors: Sequence[Tensor]) -> list[list[SampledToken]]:
        """Of each request its tokens, from ``tensors`` on the host.

        Raises ``ContractError`` for ids or counts that can't be: they are a backend's.
        """
        several = self.counts is not None
        self._check(tensors[0], tensors[1] if several else None)
        ids: list[list[int]] = tensors[0].tolist()
        counts: list[int] = tensors[1].tolist() if several else [1] * len(ids)
        rest = tensors[2 if several else 1 :]
        if self._report is None:
            return [
                [SampledToken(token, None) for token in row[:count]]
                for row, count in zip(ids, counts, strict=True)
            ]
        entries = iter(self._report.entries(rest))
        asked = set(self._asked)
        found = []
        for i, (row, count) in enumerate(zip(ids, counts, strict=True)):
            told = [next(entries) for _ in row] if i in asked else [None] * len(row)
            found.append([SampledToken(*one) for one in zip(row[:count], told, strict=False)])
        return found

    def _check(self, ids: Tensor, counts: Tensor | None) -> None:
        if counts is not None:
            width = ids.shape[1]
            most = counts.new_tensor(self._most or [width] * len(counts))
            bad = ((counts < 1) | (counts > most)).nonzero().flatten().tolist()
            if bad:
                found, limit = int(counts[bad[0]]), int(most[bad[0]])
                raise ContractError(
                    f"{self._source} emitted {found} tokens for a window with {limit - 1} drafts; "
                    f"it may be 1 to {limit}"
                )
            ids = ids[torch.arange(width) < counts.unsqueeze(-1)]
        check_drawn(self._source, ids, self._vocab)


def check_drawn(source: str, ids: Tensor, vocab_size: int) -> None:
    """Raises ``ContractError``, which names the ``source``, for an id that is none."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.numel():
        raise ContractError(f"{source} drew {bad[0].item()}; ids are 0 to {vocab_size - 1}")
