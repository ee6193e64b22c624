"""Connections of clients: how long one may take over a request, and how many there may be.

What is measured is the client's part alone: while the server itself doesn't read, no time runs.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from heapq import nsmallest
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

FILES_KEPT = 128
"""Of the files that a process may open: for the engine, logs, images and whatever else is no
client.
"""
FILES_WANTED = 65536
BODY_RATE = 16384
"""Bytes of a body a second; each second's worth of them is a second more for the rest."""
ROOM_MADE = 256
"""One of so many connections makes room at once: to find the oldest, all are looked at."""


@dataclass(frozen=True)
class Limits:
    """
    Attributes:
        head_seconds: from the first byte of a request, or from the connection, to its last header.
        body_seconds: from there to the end of the body, beside what ``BODY_RATE`` gives.
        reader_seconds: that an answer may wait while nothing of it is taken.
        head_bytes: of a request's line and headers, with those behind a body.
        connections: at one time.
    """

    head_seconds: float
    body_seconds: float
    reader_seconds: float
    head_bytes: int
    connections: int

    @property
    def tick_seconds(self) -> float:
        """How often connections are looked at."""
        return min(1.0, self.head_seconds / 4, self.body_seconds / 4, self.reader_seconds / 4)


class _Phase(Enum):
    """What a client does."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    WAITING = "waiting"


class Connection(HttpToolsProtocol):
    """One connection. A client that is too slow, or one too many, is told so and cut off."""

    def __init__(self, *words: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*words, **options)
        self._limits = limits
        self._phase = _Phase.IDLE
        self._fresh = True  # no request has come yet
        self._since = self.loop.time()  # when the phase began
        self._bytes = 0  # of the phase
        self._head = 0  # bytes of the request's headers that are there
        self._upgrade = False  # whether the request asks for another protocol
        self._unsent = 0  # of answers, when it was looked at last
        self._taken = self._since  # when the client took something last

    @property
    def at_rest(self) -> bool:
        """Whether nothing would be lost with it but the beginning of a request."""
        resting = self._phase in (_Phase.IDLE, _Phase.HEAD)
        answered = self.cycle is None or self.cycle.response_complete
        return resting and answered and self.transport.get_write_buffer_size() == 0

    @property
    def _earlier(self) -> bool:
        """Whether another request is still to be answered before the one that comes."""
        answered = self.cycle is None or self.cycle.response_complete
        return bool(self.pipeline) or (self._phase is _Phase.HEAD and not answered)

    def check(self, now: float, late: float = 0.0) -> None:
        """Cuts it off if the client is too slow.

        Args:
            now: of the loop's clock.
            late: seconds since the last call in which the server itself was held up.
        """
        self._since += late
        self._taken += late
        self._check_reader(now)
        if self.transport.is_closing() or self._phase is _Phase.WAITING:
            return
        if self._phase is _Phase.IDLE and not self._fresh:  # the keep-alive time is uvicorn's
            return
        if self.flow.read_paused or self._earlier:
            self._since = now
            return
        limits, body = self._limits, self._phase is _Phase.BODY
        allowed = limits.body_seconds + self._bytes / BODY_RATE if body else limits.head_seconds
        if now - self._since <= allowed:
            return
        if self._phase is _Phase.IDLE:
            self.transport.close()
            return
        part, flag = ("body", "--body-timeout-s") if body else ("headers", "--header-timeout-s")
        self._cut(408, f"the request's {part} did not come in time: {flag}", "request_timeout")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._limits.connections
        if len(self.connections) <= limit:
            return
        others = [c for c in self.connections if c is not self and isinstance(c, Connection)]
        resting = [c for c in others if c.at_rest]
        for one in nsmallest(1 + limit // ROOM_MADE, resting, key=lambda c: c._since):
            one.transport.close()
            self.connections.discard(one)
        if not resting:
            text = f"{limit} connections are open, and no more are taken: --limit-concurrency"
            self._cut(503, text, "too_many_connections")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # with TLS there may be more
            return
        if self._phase is _Phase.IDLE:  # by an empty line, too, which begins no request
            self._enter(_Phase.HEAD)
        self._bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except HttpParserError as error:
            self.send_400_response(str(error))
        if self._phase is _Phase.HEAD and self._bytes > self._limits.head_bytes:
            self._cut_head()

    def send_400_response(self, msg: str) -> None:
        if self._head > self._limits.head_bytes:
            self._cut_head()
            return
        text = "the request is no HTTP/1.1 (works: http:// and https:// as they were configured)"
        self._cut(400, text, "bad_request")

    def _feed(self, data: bytes) -> None:
        """A client may ask for another protocol; it is answered as one that has not. The parser
        takes all behind such headers, the body too, for that protocol's: so it is given them again,
        without the wish. Raises ``HttpParserError``.
        """
        left: list[bytes | memoryview] = [data]
        while left:
            piece = left.pop(0)
            try:
                self.parser.feed_data(piece)
            except HttpParserUpgrade as error:
                if not self._upgrade:  # CONNECT
                    return
                left[:0] = [self._plain_head(), memoryview(piece)[error.args[0] :]]

    def _plain_head(self) -> bytes:
        """The request's line and headers, but for the one that asks for another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._fresh = False
        self._head = 0
        if self._phase is not _Phase.HEAD:
            self._enter(_Phase.HEAD)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._grow(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._grow(len(name) + len(value) + len(": \r\n"))

    def on_headers_complete(self) -> None:
        self._upgrade = self.parser.should_upgrade() and any(
            name == b"upgrade" for name, _ in self.headers
        )
        if not self._upgrade:
            super().on_headers_complete()
            self._enter(_Phase.BODY)

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        super().on_message_complete()
        # It may have been answered before all of it was there.
        self._enter(_Phase.IDLE if self.cycle.response_complete else _Phase.WAITING)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is _Phase.WAITING and not self.pipeline and self.cycle.response_complete:
            self._enter(_Phase.IDLE)

    def _grow(self, size: int) -> None:
        """Ends the parsing if the headers are too large: ``send_400_response`` is called then."""
        self._head += size
        if self._head > self._limits.head_bytes:
            raise ValueError("headers are too large")

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._bytes = 0

    def _check_reader(self, now: float) -> None:
        """What is left to send waits here if the system's own buffer is full."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._taken = unsent, now
        elif now - self._taken > self._limits.reader_seconds:
            sock = self.transport.get_extra_info("socket")
            if sock is not None:  # else the system goes on trying to send what it holds
                with suppress(OSError):  # it has ended meanwhile
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def _cut_head(self) -> None:
        most = self._limits.head_bytes
        text = f"headers: more than {most:,} bytes: --h11-max-incomplete-event-size"
        self._cut(431, text, "headers_too_large")

    def _cut(self, status: int, text: str, code: str) -> None:
        """Ends the connection, with an answer if there has been none to the request and no other
        is being answered.
        """
        if self.transport.is_closing():
            return
        cycle, body = self.cycle, self._phase is _Phase.BODY
        told = cycle is not None and cycle.response_started
        if told and cycle.response_complete and not body:  # to the request before
            told = False
        if not (told or self.pipeline):
            self.transport.write(_answer(status, text, code))
        self.transport.close()


def _answer(status: int, text: str, code: str) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": text, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        + ("retry-after: 5\r\n" if status == 503 else "")
        + "connection: close\r\n\r\n"
    )
    return head.encode() + body


async def watch(connections: set[Any], limits: Limits) -> None:
    """Looks at all connections from time to time, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + limits.tick_seconds
        await asyncio.sleep(limits.tick_seconds)
        now = loop.time()
        for one in list(connections):
            if isinstance(one, Connection):
                one.check(now, now - due)


def connection_limit(asked: int | None) -> int:
    """Connections at most: what is asked for, or what the system's limit of open files leaves,
    which is raised as far as it may be.

    Raises ``ValueError`` for more than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, FILES_WANTED, (asked or 0) + FILES_KEPT)
    able = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if able > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (able, hard))
    room = max(1, max(soft, able) - FILES_KEPT)
    if asked is not None and asked > room:
        raise ValueError(f"{asked} with a limit of {able} open files; works: up to {room}")
    return room if asked is None else asked
