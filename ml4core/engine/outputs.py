"""What the engine core hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts.

    Attributes:
        drafts: times that a request was drafted for and its drafts were judged.
        draft_tokens: drafts that were judged.
        accepted: by place in the window, drafts that were accepted there. Those that stand at or
            behind the last token that the request takes aren't counted: a window gives one token
            more than it counts.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a judged window gives on average; 1 is that of no drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Part of the drafts that are accepted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Part of the judged windows in which a place was accepted."""
        return [count / self.drafts for count in self.accepted] if self.drafts else []

    def add(self, judged: int, accepted: int) -> None:
        """A window of ``judged`` drafts, the first ``accepted`` of which were accepted."""
        if not judged:
            return
        self.drafts += 1
        self.draft_tokens += judged
        if len(self.accepted) < judged:
            self.accepted += [0] * (judged - len(self.accepted))
        for place in range(accepted):
            self.accepted[place] += 1

    def merge(self, other: DraftCounts) -> None:
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted += [0] * (len(other.accepted) - len(self.accepted))
        for place, count in enumerate(other.accepted):
            self.accepted[place] += count

    def copy(self) -> DraftCounts:
        return DraftCounts(self.drafts, self.draft_tokens, list(self.accepted))


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
        drafts: of this answer up to now, going on as it does; None without a drafter.
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
    drafts: DraftCounts | None = None


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine at one moment; counts are since it opened.

    Attributes:
        usage: part of each group's pages in use, 0 to 1.
        cache_queries, cache_hits: prompt tokens by group.
        prompt_tokens: tokens computed as prompt; output tokens computed again count too.
        drafts: None without a drafter.
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
    drafts: DraftCounts | None = None
