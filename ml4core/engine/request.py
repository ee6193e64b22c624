"""One sequence as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ml4core.engine.block_hash import ROOT, hash_block
from ml4core.engine.grammars import GrammarState
from ml4core.engine.image_inputs import PlacedImage, block_keys
from ml4core.engine.outputs import DraftCounts
from ml4core.engine.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOP = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORT = "abort"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        return self not in (Status.WAITING, Status.RUNNING, Status.PREEMPTED)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and one answer to it. Of a request for several answers each is its own ``Request``.

    Attributes:
        index: which answer of the request it is.
        seed: of its sampling noise.
        limit: tokens in all, prompt included, at which it ends.
        stop_ids: tokens that end it.
        order: counts up over all requests; with ``arrival`` equal, the lower one came first.
        priority: lower is sooner.
        read_cache: whether its prompt may be taken from the prefix cache.
        prompt_logprobs: entries for the prompt's tokens from the second on, as they become known.
        draft_counts: what became of its drafts; None without a drafter.
        grammar: what its output is held to.
        images: of its prompt, in order.

    Set by the scheduler:
        num_computed: tokens whose keys are in the caches once the steps in flight have run.
        num_confirmed: those whose step is known to have run.
        num_placeholders: tokens that steps in flight will have drawn.
        epoch: counts up whenever results in flight become void.
        num_cached_tokens: prompt tokens taken from the prefix cache at first; None before that.
        drafts: for the places behind the newest token, as they are known. One list for good:
            whoever draws looks into it.

    Set by the KV manager:
        pages: page ids by group, by position; the null page where a window has passed.
        capacity: tokens that the pages have room for.
        cached_blocks: leading blocks that have been offered to the prefix cache.
        key_start: by group, the first token that has a key there, where a reused prefix lacks some.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    seed: int = 0
    index: int = 0
    stop_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    order: int = 0
    priority: int = 0
    cache_salt: str | None = None
    read_cache: bool = True
    grammar: GrammarState | None = None
    images: tuple[PlacedImage, ...] = ()
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0
    num_confirmed: int = 0
    num_placeholders: int = 0
    num_cached_tokens: int | None = None
    drafts: list[int] = field(default_factory=list)
    epoch: int = 0
    slot: int = -1
    pages: dict[str, list[int]] = field(default_factory=dict)
    capacity: int = 0
    cached_blocks: int = 0
    key_start: dict[str, int] = field(default_factory=dict)
    draft_counts: DraftCounts | None = None
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt, then output."""
        return self.prompt_ids + self.output_ids

    @property
    def reports(self) -> bool:
        """Whether prompt logprobs are wanted that are not known yet."""
        if self.params.prompt_logprobs is None or self.index:
            return False
        return len(self.prompt_logprobs) < len(self.prompt_ids) - 1

    def append(self, token: int) -> None:
        self.output_ids.append(token)
        self.num_tokens += 1

    def extra_keys(self, block: int, block_size: int) -> tuple[bytes, ...]:
        """What beside its tokens makes a block what it is."""
        start = block * block_size
        keys = block_keys(self.images, start, start + block_size) if self.images else ()
        if block == 0 and self.cache_salt is not None:
            return (self.cache_salt.encode("utf-8", "surrogatepass"), *keys)
        return keys

    def hashes(self, blocks: int, block_size: int, root: bytes = ROOT) -> list[bytes]:
        """Names of at least the first ``blocks`` blocks, each of which must be full. ``root`` is
        the same at each call.
        """
        known = self._hashes
        while len(known) < blocks:
            block = len(known)
            start = block * block_size
            parent = known[-1] if known else root
            tokens = self._slice(start, start + block_size)
            known.append(hash_block(parent, tokens, self.extra_keys(block, block_size)))
        return known

    def _slice(self, start: int, stop: int) -> list[int]:
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:] + self.output_ids[max(0, start - prompt) : stop - prompt]
