"""Messages between replicas: JSON lists, one a line, over TCP."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from typing import Any

Message = list[Any]
"""A word, and what belongs to it."""

VERSION = 1
MAX_BYTES = 1 << 20
"""Of a message: who sends more is no replica."""
_READ = 1 << 16
_IDLE_S, _EACH_S, _TIMES = 10, 5, 4
"""A host that is gone says nothing: it is asked so often, and given up then."""


class LineClosedError(Exception):
    """The other end has gone, or speaks another language."""


class Line:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", _IDLE_S),
            ("TCP_KEEPINTVL", _EACH_S),
            ("TCP_KEEPCNT", _TIMES),
            ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _EACH_S * _TIMES)),  # ms, of what was sent
        ):
            if hasattr(socket, option):  # not on each system
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = sock
        self._lock = threading.Lock()
        self._heard = bytearray()
        self._closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *message: Any) -> None:
        """Raises ``LineClosedError``."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise LineClosedError(str(error)) from error

    def receive(self) -> list[Message]:
        """Waits for something, and gives all whole messages that have come, maybe none. Raises
        ``LineClosedError``.
        """
        try:
            data = self._socket.recv(_READ)
        except OSError as error:
            raise LineClosedError(str(error)) from error
        if not data:
            raise LineClosedError("its connection was closed")
        self._heard += data
        *whole, rest = self._heard.split(b"\n")
        if len(rest) > MAX_BYTES:
            raise LineClosedError("a message without an end")
        self._heard = rest
        return [_message(bytes(one)) for one in whole]

    def close(self) -> None:
        """Ends the waits of both ends. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _message(data: bytes) -> Message:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise LineClosedError("no message of a replica") from error
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise LineClosedError("no message of a replica")
    return found
