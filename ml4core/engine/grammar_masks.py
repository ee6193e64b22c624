"""What grammars let through, put into a step's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ml4core.engine.grammars import Masks
from ml4core.engine.sampler_io import SamplerRow
from ml4core.engine.transfers import ints, upload

NEG_INF = float("-inf")


class Constraint(NamedTuple):
    """Masks of some rows of logits.

    Attributes:
        rows: their numbers, ascending.
    """

    rows: list[int]
    masks: Masks

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits fp32 [J, vocab], a fresh tensor, -inf where a token may not come."""
        device, vocab = logits.device, logits.shape[-1]
        allowed = self._unpacked(device)[:, :vocab]
        if (beyond := vocab - allowed.shape[-1]) > 0:  # ids that the tokenizer lacks never come
            allowed = torch.nn.functional.pad(allowed, (0, beyond))
        if len(self.rows) == len(logits):
            return torch.where(allowed, logits.to(torch.float32), NEG_INF)
        at = ints(self.rows, device)
        held = torch.where(allowed, logits[at].to(torch.float32), NEG_INF)
        return logits.to(torch.float32, copy=True).index_copy_(0, at, held)

    def _unpacked(self, device: torch.device) -> Tensor:
        """The masks as bool [rows, 32 words]. A device is sent the bits alone."""
        if device.type == "cpu":
            bits = np.unpackbits(self.masks.view(np.uint8), axis=-1, bitorder="little")
            return torch.from_numpy(bits).view(torch.bool)
        return unpack(upload([self.masks], device)[0])


def unpack(masks: Tensor) -> Tensor:
    """Bits of int32 [rows, words], lowest first, as bool [rows, 32 words]."""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks.unsqueeze(-1) >> shifts) & 1).flatten(1) != 0


def constrain(rows: Sequence[SamplerRow], width: int = 1) -> Constraint | None:
    """Masks for ``width`` consecutive rows of logits of each of ``rows``; None if none has a
    grammar. With one row each the drafts don't count.
    """
    chosen = [(i, row) for i, row in enumerate(rows) if row.grammar is not None]
    if not chosen:
        return None
    compiler = chosen[0][1].grammar.compiler  # type: ignore[union-attr]
    # Behind a draft that may not come anything may: it is rejected, and they are never drawn.
    masks = np.full((len(chosen) * width, compiler.words), -1, np.int32)
    work = []
    for place, (_, row) in enumerate(chosen):
        assert row.grammar is not None
        row.grammar.follow(row.output_ids)
        if not row.grammar.error:
            work.append((row.grammar.matcher, place * width, row.drafts[: width - 1]))
    compiler.fill(work, masks)
    for place, (_, row) in enumerate(chosen):
        assert row.grammar is not None
        own = masks[place * width : (place + 1) * width]
        if row.grammar.error:  # ``take`` ends the sequence
            own[:] = _only(compiler.eos_id, compiler.words)
        else:
            _forbid_stops(own, row)
    return Constraint([i * width + j for i, _ in chosen for j in range(width)], masks)


def _forbid_stops(masks: Masks, row: SamplerRow) -> None:
    """Until ``min_tokens`` are made nothing ends the answer, unless its form leaves no other."""
    for j in range(min(len(masks), row.params.min_tokens - len(row.output_ids))):
        kept = masks[j].copy()
        for token in row.stop_ids:
            if token < 32 * len(kept):
                kept[token // 32] &= ~_bit(token)
        if kept.any():
            masks[j] = kept


def _only(token: int, words: int) -> Masks:
    mask = np.zeros(words, np.int32)
    mask[token // 32] = _bit(token)
    return mask


def _bit(token: int) -> np.int32:
    return np.uint32(1 << token % 32).view(np.int32)
