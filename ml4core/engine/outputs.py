"""What the engine core hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class SequenceOutput:
    """What a step made for one answer of a request.

    Attributes:
        index: which of the request's answers.
        token_ids: new tokens; a token that ends the answer is among them.
        finish_reason: ``stop``: a stop token was made; ``length``: a limit was reached; ``abort``:
            it was told to end; ``error``: the engine has stopped. None while it goes on.
        logprobs: an entry for each new token, where the request asks for it.
        prompt_tokens, cached_tokens, output_tokens: so far; ``cached_tokens`` of the prompt's were
            in the prefix cache.
        prompt_logprobs: with the first token, an entry for each token of the prompt, None for its
            first, where the request asks for it.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    logprobs: list[Any] | None = None
    prompt_logprobs: list[Any] | None = None


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine at one moment; counts are since it opened.

    Attributes:
        usage: part of each group's pages in use, 0 to 1.
        cache_queries, cache_hits: prompt tokens by group.
        prompt_tokens: tokens computed as prompt; output tokens computed again count too.
    """

    running: int
    waiting: int
    steps: int
    preemptions: int
    prompt_tokens: int
    output_tokens: int
    usage: Mapping[str, float]
    cache_queries: Mapping[str, int]
    cache_hits: Mapping[str, int]
