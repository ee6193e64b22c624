"""What goes into the sampler and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ml4core.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplerRow:
    """One row of logits and what is known of its sequence.

    Attributes:
        prompt_ids: the prompt. The same object in every step of a request, and not changed: what is
            computed of it is kept.
        output_ids: the tokens before the one to be drawn, without the prompt.
        seed: of the noise, a signed 64-bit integer.
        position: of the row whose logits these are: one before the token to be drawn.
        stop_ids: ids that end the sequence, forbidden until ``min_tokens`` are made.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    position: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Logprob:
    """A token's natural logarithm of probability, and its rank: 1 is the likeliest, ties go to the
    lowest id.
    """

    logprob: float
    rank: int


@dataclass(frozen=True)
class SampledToken:
    """A drawn token. ``logprobs``, if asked for, has it first, then the likeliest in order."""

    token_id: int
    logprobs: dict[int, Logprob] | None
