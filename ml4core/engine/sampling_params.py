"""How tokens are chosen. Names are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ml4core.engine.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """Choices of one request.

    Attributes:
        temperature: 0 takes the likeliest token.
        max_tokens: tokens to make at most.
        seed: of the request's noise; None takes the engine's.
        stop_token_ids: ids that end the output, beside the tokenizer's end of sequence.
        ignore_eos: go on after the end of sequence.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError("temperature", self.temperature, "a finite number, 0 or above")
        if self.max_tokens < 1:
            raise RequestError("max_tokens", self.max_tokens, "1 or above")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError("seed", self.seed, "a 64-bit integer")
        for token in self.stop_token_ids:
            if token < 0:
                raise RequestError("stop_token_ids", token, "token ids, 0 or above")
