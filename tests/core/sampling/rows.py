"""Rows for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ml4core.compose.ops import COMPOSED
from ml4core.engine.sampler import Sampler, SamplerRow
from ml4core.engine.sampling_params import SamplingParams


def sampler(vocab: int) -> Sampler:
    return Sampler(COMPOSED, vocab)


def row(
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    seed: int = 0,
    position: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    **params: Any,
) -> SamplerRow:
    where = len(prompt) + len(output) if position is None else position
    return SamplerRow(SamplingParams(**params), prompt, output, seed, where, stop_ids)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(logits: Tensor, rows: Sequence[SamplerRow]) -> list[int]:
    return [token.token_id for token in sampler(logits.shape[-1])(logits, rows)]


class Recorder:
    """Stands for the ``sample`` op: keeps the logits that it is given, and takes the likeliest."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Tensor, temperature: Tensor, seeds: Tensor, at: Tensor) -> Tensor:
        self.calls.append((logits.clone(), temperature.clone()))
        return COMPOSED["sample"](logits, torch.zeros_like(temperature), seeds, at)

    def laws(self) -> Tensor:
        """Probabilities [rows, vocab] that the only call was to draw from."""
        ((logits, temperature),) = self.calls
        return torch.softmax(logits.double() / temperature.double().unsqueeze(-1), dim=-1)
