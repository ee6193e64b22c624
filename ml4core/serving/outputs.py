"""What a caller of the Python API gets. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ml4core.engine.outputs import DraftCounts, FinishReason


@dataclass(frozen=True)
class Logprob:
    """A token at one place of a text.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 is the likeliest.
        decoded_token: its text alone; U+FFFD for parts of a character.
    """

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = Mapping[int, Logprob]
"""By token id: the token that stands there first, then the likeliest in order."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, up to now.

    Attributes:
        index: which of the request's ``n`` answers.
        text: without the stop, unless the request wants it.
        token_ids: a token that ended the answer is the last; none behind a stop string.
        cumulative_logprob: sum over ``token_ids``; None unless logprobs are asked for.
        logprobs: an entry for each of ``token_ids``, if asked for.
        finish_reason: None while it goes on.
        stop_reason: the stop string or the stop token id that ended it; None for all other ends,
            the tokenizer's end of sequence among them.
        drafts: what became of its drafts; None without a drafter.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    drafts: DraftCounts | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A request and its answers, up to now.

    Attributes:
        prompt: its text; None if it was given as ids or as a chat.
        prompt_token_ids: one list for all outputs of a request.
        prompt_logprobs: an entry for each prompt token, None for the first, if asked for.
        finished: whether every answer has ended.
        num_cached_tokens: prompt tokens that were taken from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
