"""What a request changes in its logits before the temperature: bias, allowed ids, penalties."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml4core.engine.sampler_io import SamplerRow
from ml4core.engine.transfers import floats, ints, upload

NEG_INF = float("-inf")


class LogitsProcessors:
    """Edits of logits, for rows of any mixture. Keeps tensors of what does not change between the
    steps of a request: its prompt and its allowed ids, which are known by identity.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._kept: dict[int, tuple[Sequence[int], Tensor]] = {}

    def __call__(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Edited logits, a fresh fp32 [J, vocab], of logits [J, vocab].

        Raises ``ValueError`` for a token id outside the vocabulary in a row with penalties.
        """
        edited = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        sets = _DistinctIds(self._vocab, edited.device, self._kept)
        self._allow(edited, rows, sets)
        self._bias(edited, rows)
        self._forbid_stops(edited, rows)
        self._penalise(edited, rows, sets)
        self._kept = sets.used
        return edited

    def _allow(self, logits: Tensor, rows: Sequence[SamplerRow], sets: _DistinctIds) -> None:
        chosen = [
            (i, allowed) for i, row in enumerate(rows) if (allowed := row.params.allowed_token_ids)
        ]
        if not chosen:
            return
        numbers = [i for i, _ in chosen]
        at = self._flat(numbers, [sets.of(allowed) for _, allowed in chosen])
        flat = logits.view(-1)
        kept = flat[at]
        logits.index_fill_(0, ints(numbers, logits.device), NEG_INF)
        flat[at] = kept

    def _bias(self, logits: Tensor, rows: Sequence[SamplerRow]) -> None:
        at: list[int] = []
        values: list[float] = []
        for i, row in enumerate(rows):
            for token, value in (row.params.logit_bias or {}).items():
                at.append(i * self._vocab + token)
                values.append(value)
        if at:
            device = logits.device
            logits.view(-1).index_add_(0, ints(at, device), floats(values, device))

    def _forbid_stops(self, logits: Tensor, rows: Sequence[SamplerRow]) -> None:
        at: list[int] = []
        for i, row in enumerate(rows):
            if len(row.output_ids) >= row.params.min_tokens or row.grammar is not None:
                continue  # a grammar sees to it itself: it may leave nothing else
            forbidden = {token for token in row.stop_ids if token < self._vocab}
            allowed = row.params.allowed_token_ids
            if allowed is not None and forbidden.issuperset(allowed):
                continue  # nothing would be left
            at += [i * self._vocab + token for token in forbidden]
        if at:
            logits.view(-1).index_fill_(0, ints(at, logits.device), NEG_INF)

    def _penalise(self, logits: Tensor, rows: Sequence[SamplerRow], sets: _DistinctIds) -> None:
        chosen = [i for i, row in enumerate(rows) if row.params.penalises]
        if not chosen:
            return
        device, vocab = logits.device, self._vocab
        lengths = [len(rows[i].output_ids) for i in chosen]
        ids = np.array(list(chain.from_iterable(rows[i].output_ids for i in chosen)), np.int64)
        check_ids(ids, vocab)
        owner = np.repeat(np.arange(len(chosen)), lengths)
        row_of = np.repeat(np.array(chosen, np.int64), lengths)
        # Each token made, as often as it was made: what is written twice is written alike.
        made, place, of = upload([row_of * vocab + ids, owner * vocab + ids, row_of], device)
        repeated = [i for i in chosen if rows[i].params.repetition_penalty != 1]
        if repeated:
            prompts = self._flat(repeated, [sets.of(rows[i].prompt_ids) for i in repeated])
            # Outputs of rows without this penalty are divided by 1.
            self._repetition(logits, torch.cat((made, prompts)), rows)
        each = floats([row.params.frequency_penalty for row in rows], device)
        once = floats([row.params.presence_penalty for row in rows], device)
        counts = logits.new_zeros(len(chosen) * vocab)
        counts.index_add_(0, place, logits.new_ones(1).expand(len(ids)))
        flat = logits.view(-1)
        flat[made] = flat[made] - each[of] * counts[place] - once[of]

    def _repetition(self, logits: Tensor, seen: Tensor, rows: Sequence[SamplerRow]) -> None:
        factors = floats([row.params.repetition_penalty for row in rows], logits.device)
        by = factors[seen // self._vocab]
        flat = logits.view(-1)
        found = flat[seen]
        # An index that is there twice is written twice the same.
        flat[seen] = torch.where(found > 0, found / by, found * by)

    def _flat(self, rows: Sequence[int], ids: Sequence[Tensor]) -> Tensor:
        """Indices, into logits [J, vocab] as one row, of some ids int64 [*] for each row."""
        offsets = np.array(rows, np.int64) * self._vocab
        counts = [part.numel() for part in ids]
        return torch.cat(list(ids)) + ints(np.repeat(offsets, counts), ids[0].device)


class _DistinctIds:
    """Ids of lists, each once. ``kept`` holds those of an earlier call, which are known by the
    identity of the list; ``used`` those of this one.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        kept: dict[int, tuple[Sequence[int], Tensor]],
    ) -> None:
        self._vocab = vocab_size
        self._device = device
        self._kept = kept
        self.used: dict[int, tuple[Sequence[int], Tensor]] = {}

    def of(self, ids: Sequence[int]) -> Tensor:
        """int64 [*], ascending. Raises ``ValueError`` for an id outside the vocabulary."""
        key = id(ids)  # no other object has it while the list is held here
        found = self.used.get(key) or self._kept.get(key)
        if found is None or found[1].device != self._device:
            distinct = np.unique(check_ids(np.array(ids, np.int64), self._vocab))
            found = (ids, upload([distinct], self._device)[0])
        self.used[key] = found
        return found[1]


def check_ids(ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """The ids [*]; raises ``ValueError`` for one that would reach into another row."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise ValueError(f"token id {bad[0]}: ids are 0 to {vocab_size - 1}")
    return ids
