"""The server's end: starts the engine's process, sends requests, hands out what comes back."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ml4core.engine.errors import RequestError
from ml4core.engine.image_inputs import PlacedImage
from ml4core.engine.outputs import EngineStats, SequenceOutput
from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.process.inbox import EngineGoneError, Inbox, News
from ml4core.serving.process.wire import (
    Abort,
    Add,
    Facts,
    Failed,
    Frames,
    Made,
    Rejected,
    Start,
    Stop,
    Stopped,
    frame,
)

# This process's path comes first: it decides which `ml4core` and which plugins the child sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ml4core.serving.process.child import main; main(int(sys.argv[2]))"
)
KILL_SECONDS = 10.0
"""How long the engine may take to close before it is killed."""


@dataclass(slots=True)
class _Open:
    """A request on its way. ``left``: indices of the answers that have not ended."""

    inbox: Inbox
    place: int
    left: set[int]
    on_start: Callable[[float], None] | None


class EngineLink(asyncio.Protocol):
    """An engine in its process. To be used in one event loop.

    Attributes:
        stats: as told last; None before the first telling.
        steps: that have run, as told last.
        open_sequences: answers that have not ended.
        ended: why it serves no more; None while it does.
        code: the process's exit code, once it has ended.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stats: EngineStats | None = None
        self.steps = 0
        self.ended: str | None = None
        self._facts: asyncio.Future[Facts] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self.open_sequences = 0
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count()
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._unsent: list[object] = []
        self._stepped: set[asyncio.Future[None]] = set()

    @classmethod
    async def start(cls, open: Callable[[], Any]) -> EngineLink:
        """A process that runs ``open``, which must be picklable. It may not have opened yet."""
        ours, theirs = socket.socketpair()
        link = cls()
        with theirs:
            words = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())]
            link._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), pass_fds=[theirs.fileno()]
            )
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        assert link._transport is not None
        link._transport.write(frame(Start(open)))
        return link

    async def facts(self) -> Facts:
        """Once it has opened. Raises what opening raised."""
        return await asyncio.shield(self._facts)

    async def gone(self) -> None:
        """Returns once it serves no more."""
        await asyncio.shield(self._gone)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def submit(
        self,
        inbox: Inbox,
        place: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        images: tuple[PlacedImage, ...] = (),
        on_start: Callable[[float], None] | None = None,
    ) -> int:
        """Sends a request whose outputs go to ``inbox``; its number, for ``abort``.

        ``on_start`` is told the seconds that it waited for its first row. Raises
        ``EngineGoneError``.
        """
        if self.ended is not None:
            raise EngineGoneError(self.ended)
        number = next(self._numbers)
        self._open[number] = _Open(inbox, place, set(range(params.n)), on_start)
        self.open_sequences += params.n
        self._send(Add(number, prompt_ids, params, priority, cache_salt, images))
        return number

    def abort(self, number: int, index: int | None = None) -> None:
        """Ends a request that nobody waits for any more, or one answer of it, of which nothing more
        will be told. Does nothing for what has ended.
        """
        one = self._open.get(number)
        if one is None:
            return
        self._less(number, one, one.left if index is None else {index})
        self._send(Abort(number, index))

    async def stepped(self) -> None:
        """Returns after the next step that made something. Raises ``EngineGoneError``."""
        if self.ended is not None:
            raise EngineGoneError(self.ended)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stepped.add(waiter)
        try:
            await waiter
        finally:
            self._stepped.discard(waiter)

    async def close(self) -> int:
        """Ends the process; its exit code. Requests that are open fail."""
        process = self._process
        assert process is not None
        self._closing = True
        if self.ended is None:
            self._send(Stop())
        waiting = asyncio.to_thread(process.wait, KILL_SECONDS)
        try:
            return await waiting
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)
        finally:
            if process.stdin is not None:
                process.stdin.close()
            if self._transport is not None:
                self._transport.close()

    # What follows is called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop has classes of its own

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the engine was closed" if self._closing else self._obituary())

    def _obituary(self) -> str:
        process = self._process
        assert process is not None
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            return "the engine's process has closed its connection"
        if code < 0:
            names = {one.value: one.name for one in signal.Signals}  # real-time ones have none
            return f"the engine's process was ended by {names.get(-code, f'signal {-code}')}"
        return f"the engine's process ended with code {code}"

    def _take(self, message: object) -> None:
        if isinstance(message, Made):
            self._hand_out(message)
        elif isinstance(message, Rejected):
            self._reject(message)
        elif isinstance(message, Stopped):
            self._end(f"the engine stopped by fault {message.code!r}: {message.text}")
        elif isinstance(message, Facts):
            self._facts.set_result(message)
        elif isinstance(message, Failed):
            error = message.kind(*message.arguments)
            self._facts.set_exception(error)
            self._end(str(error))

    def _hand_out(self, made: Made) -> None:
        now = time.monotonic()
        self.steps = made.steps
        if made.stats is not None:
            self.stats = made.stats
        for number, seconds in made.started:
            one = self._open.get(number)
            if one is not None and one.on_start is not None:
                one.on_start(seconds)
        for fields in made.outputs:
            number = fields[0]
            one = self._open.get(number)
            if one is None:  # nobody waits for it any more
                continue
            output = SequenceOutput("", *fields[1:])
            if output.finish_reason is not None:
                self._less(number, one, {output.index})
            one.inbox.put(News(one.place, output, now))
        if made.outputs:
            for waiter in self._stepped:
                if not waiter.done():
                    waiter.set_result(None)

    def _reject(self, message: Rejected) -> None:
        one = self._open.get(message.id)
        if one is None:
            return
        self._less(message.id, one, one.left)
        if message.field:
            one.inbox.fail(RequestError(message.field, message.value, message.remedy))
        else:
            one.inbox.fail(RuntimeError(message.value))

    def _less(self, number: int, one: _Open, ended: set[int]) -> None:
        # An answer that the engine ends while its abort is on the way counts once.
        left = one.left - ended
        self.open_sequences -= len(one.left) - len(left)
        one.left = left
        if not left:
            del self._open[number]

    def _end(self, reason: str) -> None:
        if self.ended is not None:
            return
        self.ended = reason
        for one in self._open.values():
            one.inbox.fail(EngineGoneError(reason))
        self._open.clear()
        self.open_sequences = 0
        for waiter in self._stepped:
            if not waiter.done():
                waiter.set_exception(EngineGoneError(reason))
        if not self._facts.done():
            self._facts.set_exception(EngineGoneError(reason))
            self._facts.exception()  # nobody may be waiting
        if not self._gone.done():
            self._gone.set_result(None)

    def _send(self, message: object) -> None:
        """Messages of one turn of the loop go as one: parameters that they share go once."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(messages))
