"""The engine's end of the socket: never waits for the server unless there is nothing else to do."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Any

from ml4core.serving.process.wire import Frames, Made, frame

_READ = 1 << 18


class ChannelClosedError(Exception):
    """The server has gone."""


class Channel:
    """Messages in, messages out, in the thread that steps the engine.

    What steps made is collected for as long as the socket takes nothing, and then goes as one
    message: a server that lags gets more tokens at once, and the engine never waits for it. What is
    held is bounded by the longest answers of the requests that are open.

    Attributes:
        alarms: descriptors that end a wait for messages, once one can be read from.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.alarms: tuple[int, ...] = ()
        sock.setblocking(False)
        self._socket = sock
        self._frames = Frames()
        self._made: list[Made] = []
        self._sending = memoryview(b"")

    def receive(self, *, wait: bool) -> Iterator[Any]:
        """Messages that have come; with ``wait`` at least once something has, or an alarm rings,
        while what is to be sent goes on its way. Raises ``ChannelClosedError``.
        """
        if wait:
            self._sleep()
        while True:
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError from error
            if not data:
                raise ChannelClosedError
            for message in self._frames.feed(data):
                yield from message if isinstance(message, list) else (message,)
            if len(data) < _READ:
                return

    def put(self, message: object) -> None:
        """Sends as much of it as the socket takes; the rest goes by ``flush``."""
        if isinstance(message, Made):
            self._made.append(message)
        else:
            self._collect()
            self._sending = memoryview(bytes(self._sending) + frame(message))
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes. Raises ``ChannelClosedError``."""
        while True:
            if not self._sending:
                self._collect()
            if not self._sending:
                return
            try:
                sent = self._socket.send(self._sending)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError from error
            self._sending = self._sending[sent:]

    def drain(self, seconds: float) -> None:
        """Sends all, or gives up once the socket has taken nothing for so long."""
        self.flush()
        while self._sending or self._made:
            if not select.select([], [self._socket], [], seconds)[1]:
                return
            self.flush()

    def _sleep(self) -> None:
        while True:
            writable = [self._socket] if self._sending or self._made else []
            sources: list[Any] = [self._socket, *self.alarms]
            readable, ready, _ = select.select(sources, writable, [])
            if ready:
                self.flush()
            if readable:
                return

    def _collect(self) -> None:
        """What was made, as one message, behind what is being sent."""
        if not self._made:
            return
        first, *more = self._made
        self._made = []
        for one in more:
            first.outputs.extend(one.outputs)
            first.started.extend(one.started)
        last = more[-1] if more else first
        stats = next((m.stats for m in reversed([first, *more]) if m.stats is not None), None)
        message = Made(first.outputs, first.started, stats, last.steps)
        self._sending = memoryview(bytes(self._sending) + frame(message))
