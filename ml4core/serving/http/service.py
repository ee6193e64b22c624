"""What all requests of a server share."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.image_limits import image_limit
from ml4core.engine.intake import check_prompt
from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.chat import ChatTemplate
from ml4core.serving.chat.images import ImageReader
from ml4core.serving.http.errors import ApiError
from ml4core.serving.http.flags import ServerArgs
from ml4core.serving.http.metrics import Metrics
from ml4core.serving.process.inbox import EngineGoneError, Inbox
from ml4core.serving.process.link import EngineLink
from ml4core.serving.process.wire import Facts
from ml4core.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ml4core.serving.http.exchange import Exchange

T = TypeVar("T")

LONG = 16384
"""Bytes of a body from which on its text is read in a thread, so that no other request waits."""
TEXT_THREADS = 2
IMAGE_THREADS = 2
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings of a request: each character of an answer is compared with each of them."""
WARM_UP_SECONDS = 600.0
"""For the first step of all, which may compile."""


class Service:
    """The engine's end, the tokenizer and what is open.

    Attributes:
        args: as given; the model is what ``/v1/models`` names it without a flag.
        draining: why no more requests are taken; None while they are.
        exchanges: requests that have not been answered to their end.
    """

    def __init__(
        self, link: EngineLink, facts: Facts, args: EngineArgs, server: ServerArgs
    ) -> None:
        self.link = link
        self.facts = facts
        self.args = args
        self.server = server
        self.names = args.served_model_name or (args.model,)
        self.started = int(time.time())
        self.tokenizer = Tokenizer.load(Path(facts.tokenizer))
        self.template = ChatTemplate(self.tokenizer)
        self.template.prepare()
        self.metrics = Metrics(
            self.names[0],
            lambda: link.stats,
            lambda: self.trouble is None,
            lambda: len(self.exchanges),
            engine_pid=link.pid,
            vllm_names=server.vllm_metrics,
        )
        self.draining: str | None = None
        self.exchanges: set[Exchange] = set()
        self._threads = ThreadPoolExecutor(TEXT_THREADS, "ml4core-text")
        self._image_threads = ThreadPoolExecutor(IMAGE_THREADS, "ml4core-image")
        self._seconds = 1.0  # of an answer, about
        self._probe: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str | None:
        """Why no more requests are taken."""
        return self.link.ended or self.draining

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of the longest token."""
        tokenizer = self.tokenizer
        return max(len(tokenizer.piece(i, False)) for i in range(tokenizer.vocab_size))

    async def read(self, size: int, read: Callable[[], T], *, images: bool = False) -> T:
        """Runs what takes long for a long body, in a thread if it is. ``images``: it may have to
        wait for a host, and texts are not to wait for that.
        """
        if size < LONG:
            return read()
        threads = self._image_threads if images else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, read)

    def image_reader(self) -> ImageReader | None:
        """For the images of one request; None where the engine takes none."""
        limit = image_limit(self.args.limit_mm_per_prompt)
        if not limit:
            return None
        server = self.server
        return ImageReader(
            limit,
            domains=tuple(host.lower() for host in server.allowed_media_domains),
            folder=server.allowed_local_media_path,
        )

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            works = ", ".join(self.names)
            raise ApiError(
                404,
                f"model: {name!a} is not served (works: {works})",
                param="model",
                code="model_not_found",
            )

    def check_size(self, name: str, size: int) -> None:
        """Raises ``RequestError`` for a text that is too long whatever its tokens are, before they
        are looked for. ``size``: in bytes of UTF-8.
        """
        longest = self.facts.max_model_len - 1
        if size > longest * self.token_bytes:
            least = -(-size // self.token_bytes)
            raise RequestError(
                name,
                f"{size:,} bytes, at least {least:,} tokens",
                f"at most {longest:,} tokens: the context is {longest + 1:,} and one is needed for "
                "the answer",
            )

    def limited(
        self, name: str, prompt_ids: list[int], asked: int | None, default: int | None, field: str
    ) -> int:
        """Tokens of an answer at most, checked against the context and the page pools.

        Args:
            asked: the request's limit, which its field ``field`` gives.
            default: where it gives none; None for all that there is room for.
        """
        facts, length = self.facts, len(prompt_ids)
        check_prompt(name, prompt_ids, facts.vocab_size, facts.max_model_len)
        context = facts.max_model_len - length
        room = min(facts.max_model_len, facts.room) - length
        if room < 1:
            works = f"at most {facts.room - 1:,} in this pool: a larger --kv-cache-memory-bytes"
            raise RequestError(name, f"{length:,} tokens", works)
        if asked is None:
            return room if default is None else min(default, room)
        if asked > context:
            works = f"at most {context:,} behind {length:,} tokens of a prompt: the context is "
            raise RequestError(field, asked, works + f"{facts.max_model_len:,}")
        if asked > room:
            works = f"at most {room:,} in this pool: a larger --kv-cache-memory-bytes"
            raise RequestError(field, asked, works)
        return asked

    def check_params(self, params: SamplingParams) -> None:
        params.check(self.facts.vocab_size, self.facts.max_model_len)
        most = self.facts.max_num_seqs
        if params.n > most:
            raise RequestError("n", params.n, f"at most {most}: --max-num-seqs")
        if len(params.stop) > MAX_STOPS:
            raise RequestError("stop", f"{len(params.stop):,} texts", f"at most {MAX_STOPS}")
        if (length := sum(map(len, params.stop))) > MAX_STOP_CHARACTERS:
            works = f"at most {MAX_STOP_CHARACTERS:,} in all"
            raise RequestError("stop", f"{length:,} characters", works)
        for field in ("stop_token_ids", "allowed_token_ids"):
            if len(getattr(params, field) or ()) > (size := self.facts.vocab_size):
                found = f"{len(getattr(params, field)):,} ids"
                raise RequestError(field, found, f"at most {size:,}, the vocabulary")
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(params, field)
            if count is not None and count > self.server.max_logprobs:
                works = f"at most {self.server.max_logprobs}: --max-logprobs"
                raise RequestError(field, count, works)

    def admit(self, answers: int) -> None:
        """Raises ``ApiError`` if no more requests are taken, or too many wait; ``RequestError``
        for more answers than there are places.
        """
        if self.trouble is not None:
            raise ApiError(503, self.trouble, code="unavailable", headers={"Retry-After": "5"})
        running, queue = self.facts.max_num_seqs, self.server.max_queue
        if answers > running + queue:  # to come again would be no use
            works = f"at most {running + queue}: --max-num-seqs that run, --max-queue that wait"
            raise RequestError("prompt", f"{answers} answers", works)
        waiting = self.link.open_sequences - running
        if waiting + answers > queue:
            seconds = math.ceil(max(1.0, min(60.0, self._seconds * (waiting / running))))
            raise ApiError(
                429,
                f"{self.link.open_sequences} answers are open, and {answers} more would wait "
                f"(works: at most {running} that run and {queue} that wait: --max-queue); try "
                f"again in {seconds} s",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )

    def ended(self, seconds: float) -> None:
        """Told how long an answer took."""
        self._seconds += 0.05 * (seconds - self._seconds)

    async def probe(self, seconds: float) -> None:
        """A step of one token; one that others wait for counts as well. Raises ``EngineGoneError``,
        ``TimeoutError`` or what the engine says against it. Probes at one time share a step.
        """
        if self.link.ended is not None:
            raise EngineGoneError(self.link.ended)
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._step())
        # A step that hangs is waited for by all that ask, none of whom adds another.
        await asyncio.wait_for(asyncio.shield(self._probe), seconds)

    async def _step(self) -> None:
        inbox = Inbox()
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        number = self.link.submit(inbox, 0, [self.tokenizer.bos_id], params)
        waits = [asyncio.create_task(inbox.next()), asyncio.create_task(self.link.stepped())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
            self.link.abort(number)

    def close(self) -> None:
        for threads in (self._threads, self._image_threads):
            threads.shutdown(wait=False, cancel_futures=True)
