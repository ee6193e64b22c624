"""Tokens that were drawn on the device, and how they are told on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    ) -> None:
        """``report``: of every one of the Q rows of each of the requests in ``asked``."""
        self.ids = ids
        self.counts = counts
        self._vocab = vocab_size
        self._asked = asked
        self._report = report
        self.tensors = [ids]
        if counts is not None:
            self.tensors.append(counts)
        if report is not None:
            self.tensors += report.tensors

    def tokens(self, tensors: Sequence[Tensor]) -> list[list[SampledToken]]:
        """Of each request its tokens, from ``tensors`` on the host.

        Raises ``ValueError`` for ids or counts that can't be: they are a backend's.
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
        what, width = "op sample", ids.shape[1]
        if counts is not None:
            what = "stage verify_and_sample"
            if not bool(((counts >= 1) & (counts <= width)).all()):
                raise ValueError(
                    f"{what} emitted {counts.tolist()} tokens; each may be 1 to {width}"
                )
            ids = ids[torch.arange(width) < counts.unsqueeze(-1)]
        bad = ids[(ids < 0) | (ids >= self._vocab)]
        if bad.numel():
            raise ValueError(f"{what} drew {bad[0].item()}; ids are 0 to {self._vocab - 1}")
