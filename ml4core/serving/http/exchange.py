"""An HTTP request with its answers on their way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from ml4core.engine.image_inputs import PlacedImage
from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.http.choice import Choice
from ml4core.serving.http.errors import ClientGoneError
from ml4core.serving.http.service import Service
from ml4core.serving.process.inbox import Inbox


@dataclass(frozen=True)
class Job:
    """A prompt, ``params.n`` answers to which are wanted."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    images: tuple[PlacedImage, ...] = ()


@dataclass(slots=True)
class _Times:
    """Of one answer, on the monotonic clock."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class Exchange:
    """Sends the jobs, and takes what comes. Close it, whatever happens.

    Attributes:
        choices: those of the first job, then of the second, ...
    """

    def __init__(self, service: Service, jobs: Sequence[Job], choices: Sequence[Choice]) -> None:
        """Raises ``ApiError`` if they can't be taken now, ``RequestError`` if never."""
        service.admit(len(choices))
        self.jobs = jobs
        self.choices = choices
        self.arrived = time.monotonic()
        self._service = service
        self._inbox = Inbox()
        self._width = jobs[0].params.n
        self._started: dict[int, float] = {}  # place -> seconds that it waited
        self._times = [_Times() for _ in choices]
        self._left = len(choices)
        self._watcher: asyncio.Task[None] | None = None
        service.exchanges.add(self)
        self._numbers = [
            service.link.submit(
                self._inbox,
                place,
                job.prompt_ids,
                job.params,
                priority=job.priority,
                cache_salt=job.cache_salt,
                images=job.images,
                on_start=lambda seconds, place=place: self._on_start(place, seconds),  # type: ignore[misc]
            )
            for place, job in enumerate(jobs)
        ]

    @property
    def finished(self) -> bool:
        return self._left == 0

    def watch(self, receive: Receive) -> None:
        """From now on the client's going ends the request."""
        self._watcher = asyncio.create_task(self._watch(receive))

    async def next(self) -> Iterable[Choice]:
        """Choices of which there is something new. Raises what ended the request."""
        touched: dict[int, Choice] = {}
        for place, output, at in await self._inbox.next():
            index = place * self._width + output.index
            choice = self.choices[index]
            if choice.finished:
                continue
            if choice.take(output):
                self._service.link.abort(self._numbers[place], output.index)
            touched[index] = choice
            self._observe(index, choice, at)
        return touched.values()

    def fail(self, error: Exception) -> None:
        """Ends it: ``next`` raises this."""
        self._inbox.fail(error)

    def close(self) -> None:
        """Ends what the engine still does for it."""
        for number in self._numbers:
            self._service.link.abort(number)
        if self._watcher is not None:
            self._watcher.cancel()
        if not self.finished:
            self._service.metrics.cancelled.inc()
        self._service.exchanges.discard(self)

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of the answers up to now."""
        prompt = sum(len(job.prompt_ids) for job in self.jobs)
        made = sum(choice.stream.num_tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self._width])
        details: dict[str, Any] = {
            "reasoning_tokens": sum(c.stream.num_reasoning_tokens for c in self.choices)
        }
        drafts = [choice.drafts for choice in self.choices if choice.drafts is not None]
        if drafts:
            counts = drafts[0].copy()
            for more in drafts[1:]:
                counts.merge(more)
            details |= {
                "accepted_prediction_tokens": counts.accepted_tokens,
                "rejected_prediction_tokens": counts.draft_tokens - counts.accepted_tokens,
                "num_drafts": counts.drafts,
                "accepted_per_position": counts.accepted,
            }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": details,
        }

    @property
    def first_token_seconds(self) -> float | None:
        """From the request's arrival; None before there is a token."""
        first = min((times.first for times in self._times if times.first), default=None)
        return None if first is None else first - self.arrived

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGoneError())

    def _on_start(self, place: int, seconds: float) -> None:
        self._started[place] = seconds
        self._service.metrics.observe("request_queue_time_seconds", seconds)

    def _observe(self, index: int, choice: Choice, at: float) -> None:
        times, observe = self._times[index], self._service.metrics.observe
        if not times.first:
            times.first = at
            if index % self._width == 0:
                observe("time_to_first_token_seconds", at - self.arrived)
        else:
            observe("inter_token_latency_seconds", at - times.last)
        times.last = at
        if not choice.finished:
            return
        self._left -= 1
        tokens, params = choice.stream.num_tokens, self.jobs[choice.place].params
        waited = self._started.get(choice.place, 0.0)
        self._service.ended(at - self.arrived - waited)
        self._service.metrics.ended(str(choice.stream.finish_reason))
        observe("request_generation_tokens", tokens)
        observe("request_decode_time_seconds", at - times.first)
        if tokens > 1:
            behind = (at - times.first) / (tokens - 1)
            observe("request_time_per_output_token_seconds", behind)
        if index % self._width == 0:
            observe("e2e_request_latency_seconds", at - self.arrived)
            observe("request_prefill_time_seconds", times.first - self.arrived - waited)
            observe("request_inference_time_seconds", at - self.arrived - waited)
            observe("request_prompt_tokens", len(self.jobs[choice.place].prompt_ids))
            observe("request_params_n", params.n)
            if params.max_tokens is not None:
                observe("request_params_max_tokens", params.max_tokens)
