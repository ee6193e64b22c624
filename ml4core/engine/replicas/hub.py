"""The hub, in replica 0's process: hears all replicas, and tells them what to do together.

A replica says        and hears
hello VERSION SIZE RANK    welcome, or no TEXT
put VALUE                  all VALUES, by rank, once each has put one
wish WISH|null             go WISH, once each has wished; those that have not are called before
fault CODE TEXT            lost RANK CODE TEXT, as all others do, and as after the end of one
bye                        the same
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

from ml4core.engine.deadline import FIRST
from ml4core.engine.programs import MAX_PROGRAMS
from ml4core.engine.replicas.agreement import from_json, joined, to_json
from ml4core.engine.replicas.launch import RANK, SIZE
from ml4core.engine.replicas.wire import VERSION, Line, LineClosedError, Message

LOST, LAUNCH = "replica", "launch"
"""Codes of the faults of a replica that has gone, and of one that was launched unlike others."""
CLOSED = "was closed, and none can go on without the others"


class Hub:
    """Serves in a thread until ``close``. ``OSError`` for a port that is taken."""

    def __init__(self, port: int, size: int, seconds: float) -> None:
        """``seconds``: how long a replica may take to say what it wants of a step that others wait
        for; 0: for ever.
        """
        self._size = size
        self._seconds = seconds
        self._lines: dict[int, Line] = {}
        self._put: dict[int, Any] = {}
        self._wishes: dict[int, Any] = {}
        self._since: float | None = None  # when the next step was asked for first
        self._seen: set[str] = set()
        self._patience = seconds
        self._begun = False
        self._lost: Message | None = None
        self._server = _listening(port)
        self._quit, self._quitting = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._quit, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="ml4core-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._quitting.close()
        self._thread.join()

    def missing(self) -> list[int]:
        """Replicas that have not come."""
        return sorted(set(range(self._size)) - self._lines.keys())

    # What follows runs in the thread.

    def _serve(self) -> None:
        open = True
        while open:
            for key, _ in self._selector.select(self._left()):
                if key.data is None:
                    open = False
                else:
                    key.data()
            self._hurry()
        self._lose(0, LOST, CLOSED)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        try:
            line = Line(self._server.accept()[0])
        except OSError:  # it has gone already
            return
        self._selector.register(line, selectors.EVENT_READ, partial(self._read, line))

    def _read(self, line: Line) -> None:
        try:
            for message in line.receive():
                self._heard(line, message)
        except (LineClosedError, ValueError, TypeError) as error:
            self._selector.unregister(line)
            line.close()
            rank = self._rank(line)
            if rank is not None:
                del self._lines[rank]
                self._lose(rank, LOST, f"{error}: its process or its host has ended")

    def _rank(self, line: Line) -> int | None:
        """None for a guest."""
        return next((rank for rank, one in self._lines.items() if one is line), None)

    def _left(self) -> float | None:
        """Seconds for which a step may be waited for; None: for ever."""
        if self._since is None or not self._patience:
            return None
        return max(0.0, self._since + self._patience - time.monotonic())

    def _hurry(self) -> None:
        if self._left() != 0.0:
            return
        late = sorted(self._lines.keys() - self._wishes.keys())
        text = f"came to no step within {self._patience:g} s; --step-timeout-s sets the limit"
        self._lose(late[0], "timeout", text)

    def _heard(self, line: Line, message: Message) -> None:
        rank = self._rank(line)
        word, *more = message
        if rank is None and word == "hello":
            self._hello(line, *more)
        elif rank is None:
            raise LineClosedError("a stranger")
        elif word == "put":
            self._put[rank] = more[0]
            if len(self._put) == self._size:
                values = [self._put[one] for one in range(self._size)]
                self._put = {}
                self._tell_all("all", values)
        elif word == "wish":
            self._wish(rank, *more)
        elif word == "fault":
            self._lose(rank, *more)
        elif word == "bye":
            self._lose(rank, LOST, CLOSED)
        else:
            raise LineClosedError(f"no message of a replica, {word}")

    def _hello(self, line: Line, version: int, size: int, rank: int) -> None:
        if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
            raise ValueError("no rank of a replica")
        if version != VERSION:
            self._tell(line, "no", f"replica 0 speaks version {VERSION}, this one {version}")
        elif size != self._size:
            text = f"{SIZE} is {self._size} on replica 0 and {size} on replica {rank}"
            self._tell(line, "no", text)
            if not self._begun:  # of a deployment that runs a stranger changes nothing
                self._lose(rank, LAUNCH, text)
        elif rank in self._lines:
            self._tell(line, "no", f"there are two launches with {RANK} {rank}")
        elif self._lost is not None:
            self._tell(line, *self._lost)
        else:
            self._lines[rank] = line
            self._begun = len(self._lines) == self._size
            self._tell(line, "welcome")

    def _wish(self, rank: int, wish: Any) -> None:
        if wish is not None:
            from_json(wish)  # else it is no replica
        self._wishes[rank] = wish
        if self._since is None:
            self._since = time.monotonic()
            for other, line in self._lines.items():
                if other != rank:
                    self._tell(line, "call")
        if len(self._wishes) == self._size:
            wishes = [from_json(one) for one in self._wishes.values() if one is not None]
            agreed = to_json(joined(wishes)) if wishes else None
            self._wishes, self._since = {}, None
            self._tell_all("go", agreed)
            # One that is new may have to be compiled, which the next one waits for.
            self._patience = self._seconds * (1 if str(agreed) in self._seen else FIRST)
            if len(self._seen) >= MAX_PROGRAMS:
                self._seen.clear()
            self._seen.add(str(agreed))

    def _lose(self, rank: int, code: str, text: str) -> None:
        if self._lost is None:
            self._since = None
            self._lost = ["lost", rank, code, text]
            self._tell_all(*self._lost)

    def _tell_all(self, *message: Any) -> None:
        for line in self._lines.values():
            self._tell(line, *message)

    @staticmethod
    def _tell(line: Line, *message: Any) -> None:
        with suppress(LineClosedError):  # its end is heard where it is read from
            line.send(*message)


def _listening(port: int) -> socket.socket:
    """On all of this machine's addresses."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=64)
