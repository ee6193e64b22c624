"""What goes into the sampler and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ml4core.engine.grammars import GrammarState
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
        drafts: of a verify window: what stands behind ``output_ids`` in it.
        grammar: what the sequence is held to.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    position: int
    stop_ids: frozenset[int] = frozenset()
    drafts: Sequence[int] = ()
    grammar: GrammarState | None = None

    def window(self, width: int) -> list[SamplerRow]:
        """The rows of a verify window of ``width`` rows: each draws as if the drafts before it were
        its sequence's tokens. This row's ``position`` doesn't count: the window's first one is
        that of the newest token.
        """
        drafts, made = list(self.drafts[: width - 1]), list(self.output_ids)
        first = len(self.prompt_ids) + len(made) - 1
        return [
            replace(self, output_ids=made + drafts[:i], position=first + i, drafts=())
            for i in range(width)
        ]


@dataclass(frozen=True)
class Logprob:
    """A token's natural logarithm of probability, and its rank: 1 is the likeliest, ties go to the
    lowest id.
    """

    logprob: float
    rank: int


class SampledToken(NamedTuple):
    """A drawn token. ``logprobs``, if asked for, has it first, then the likeliest in order."""

    token_id: int
    logprobs: dict[int, Logprob] | None
