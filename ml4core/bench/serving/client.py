"""HTTP as lean as can be: what a client costs is not to be taken for what the server does."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

OnPart = Callable[[bytes], None]
"""Told each part of a body as it comes."""

LOST = (ConnectionError, TimeoutError, OSError)
"""How a request may end without an answer."""


@dataclass(slots=True)
class Reply:
    """An answer as it came.

    Attributes:
        parts: of the body, each with when it came, in seconds of ``time.perf_counter``.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)


@dataclass(frozen=True)
class Address:
    """Where a server is. ``path``: before that of each request."""

    host: str
    port: int
    tls: bool = False
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ``ValueError`` for what is no http or https URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not of the form http://host:port")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))


class Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._reply = Reply()
        self._waiter: asyncio.Future[Reply] | None = None
        self._on_part: OnPart | None = None
        self._now = 0.0
        self._closed: Exception | None = None
        self._keep = True

    @classmethod
    async def open(cls, address: Address) -> Connection:
        context = ssl.create_default_context() if address.tls else None
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(cls, address.host, address.port, ssl=context)
        return made

    @property
    def usable(self) -> bool:
        """Whether it can take another request."""
        return self._closed is None and self._waiter is None and self._keep

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        on_part: OnPart | None = None,
    ) -> Reply:
        """The answer, once all of it is there. Cancelled, it closes the connection."""
        import httptools

        if self._closed is not None:
            raise ConnectionError(str(self._closed))
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        lines.append(f"content-length: {len(body)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._on_part = Reply(), on_part
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(head + body)
            return await self._waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._waiter = None

    def pause(self) -> None:
        """Reads nothing more for now."""
        self._transport.pause_reading()

    def resume(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has closed meanwhile
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes at once, whatever is on its way."""
        if self._transport is not None:
            self._transport.abort()

    # What follows is called by the event loop and the parser.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = error or ConnectionError("the server has closed the connection")
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._closed)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._reply.parts.append((self._now, body))
        if self._on_part is not None:
            self._on_part(body)

    def on_message_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self._keep = self._parser.should_keep_alive()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._reply)


class Client:
    """Requests to one server; connections are used again."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises ``ValueError`` for what is no URL."""
        self.address = Address.parse(url)
        self._headers = {
            "host": f"{self.address.host}:{self.address.port}",
            "content-type": "application/json",
        }
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._idle: list[Connection] = []

    async def request(
        self, method: str, path: str, body: bytes = b"", on_part: OnPart | None = None
    ) -> Reply:
        """Raises one of ``LOST``."""
        connection = await self.connection()
        reply = await connection.request(
            method, self.address.path + path, self._headers, body, on_part
        )
        if connection.usable:
            self._idle.append(connection)
        return reply

    async def connection(self) -> Connection:
        """One that is open."""
        while self._idle:
            found = self._idle.pop()
            if found.usable:
                return found
        return await Connection.open(self.address)

    async def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes what was aborted
