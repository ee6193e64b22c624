"""A replica among the others: what all know before they step, and why they step no more."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ml4core.api import Fault, FaultError, Refusal, Refused
from ml4core.engine.deadline import FIRST
from ml4core.engine.replicas.agreement import Wish, from_json, to_json
from ml4core.engine.replicas.hub import LAUNCH, LOST, Hub
from ml4core.engine.replicas.launch import RANK, SIZE, ranks_text
from ml4core.engine.replicas.wire import VERSION, Line, LineClosedError, Message

MEET_S = 600.0
"""How long replicas wait for each other as they start; hosts may be launched by hand."""
SETTLE_S = 1.0
"""How long a failure of this replica waits for one of another, which may be its cause."""
_RETRY_S = 0.1
_CONNECT_S = 5.0
_SLACK_S = 5.0
"""The hub names who is late; that it is late itself is seen this much later."""


class ReplicaLostError(RuntimeError):
    """Another replica has failed, before all served."""


class LockStep:
    """Connects to replica 0's hub, which is in this process if it is that one.

    ``exchange`` and ``agree`` are for the thread that runs the engine; all else may be called from
    any.

    Attributes:
        alarm: a descriptor that can be read from while ``pending``.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, seconds: float) -> None:
        """``seconds``: how long a step that others want may be kept waiting for; 0: for ever.

        Raises ``Refused`` for a port that is taken, a launch that others know nothing of, and where
        there is no replica 0 within ``MEET_S``.
        """
        self.rank, self.size = rank, size
        self._place = f"{host}:{port}"
        self._changed = threading.Condition()
        self._most = seconds * FIRST + _SLACK_S if seconds else None
        self._called = self._failed = self._closing = self._closed = False
        self._lost: tuple[int, str, str] | None = None
        self._answers: list[Any] = []
        self._watchers: list[Callable[[], None]] = []
        self.alarm, self._ring = os.pipe()
        self._rung = False
        self._hub: Hub | None = None
        try:
            if rank == 0:
                self._hub = self._open_hub(port, seconds)
            self._line = self._connect(host, port)
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._listen, name="ml4core-replicas", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether the others want to step, or to stop."""
        return self._called or self._lost is not None

    def watch(self, callback: Callable[[], None]) -> None:
        """Has it called, in another thread, whenever ``pending`` becomes true."""
        self._watchers.append(callback)

    def meet(self, value: Any) -> list[Any]:
        """As ``exchange``, the first, which waits for the others to come. Raises ``Refused``, too,
        if they don't, or if they are of another size.
        """
        try:
            return self._answer("put", value, seconds=MEET_S)
        except ReplicaLostError:
            assert self._lost is not None
            if self._lost[1] != LAUNCH:
                raise
            works = "launches that are alike, with ranks that differ"
            raise Refused([Refusal("core", SIZE, self._lost[2], works)]) from None
        except TimeoutError:
            missing = [] if self._hub is None else self._hub.missing()
            who = ranks_text(missing) if missing else "not all replicas"
            reason = f"{who} came to {self._place} within {MEET_S:g} s"
            works = f"a launch of each {RANK} from 0 to {self.size - 1}"
            raise Refused([Refusal("core", f"{SIZE} {self.size}", reason, works)]) from None

    def exchange(self, value: Any) -> list[Any]:
        """What all replicas give, by rank: JSON-able. Raises ``ReplicaLostError``."""
        return self._answer("put", value)

    def check(self) -> None:
        """Raises ``ReplicaLostError`` once another replica has failed."""
        if self._lost is not None:
            raise ReplicaLostError(self._told())

    def agree(self, wish: Wish | None, step: int) -> Wish | None:
        """The step that all run now; None if nobody wants one. Waits for the others only where one
        of them, or this replica, does. Raises ``FaultError`` once one has failed.
        """
        with self._changed:
            if wish is None and not self.pending:
                return None
        agreed = None
        try:
            given = None if wish is None else to_json(wish)
            agreed = self._answer("wish", given, seconds=self._most)
        except TimeoutError:
            with self._changed:
                text = f"told nothing for {self._most:g} s; --step-timeout-s sets the limit"
                self._lose(0, "timeout", text)
        except ReplicaLostError:
            pass
        fault = self.fault(step)
        if fault is not None:
            raise FaultError(fault)
        return None if agreed is None else from_json(agreed)

    def fault(self, step: int, seconds: float = 0.0) -> Fault | None:
        """Why all have stopped, if it isn't that this one has failed; None while they have not, as
        far as is known after ``seconds``.
        """
        with self._changed:
            if not self._failed:
                self._changed.wait_for(lambda: self._lost is not None, seconds)
            if self._lost is None or self._failed:
                return None
            return Fault(self._lost[1], self._told(), step)

    def fail(self, code: str, text: str) -> None:
        """Stops all replicas. Does nothing if they have been."""
        with suppress(LineClosedError):
            if self._lost is None:
                self._failed = True
                self._line.send("fault", code, text)

    def leave(self) -> None:
        """Says that this replica ends; the others stop, as none can go on alone."""
        if not self._closing:
            self._closing = self._failed = True
            with suppress(LineClosedError):
                self._line.send("bye")

    def close(self) -> None:
        """Leaves, and gives all back. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.leave()
        if self._hub is not None:
            self._hub.close()
        self._line.close()
        self._thread.join()
        self._release()

    def _told(self) -> str:
        assert self._lost is not None
        rank, _, text = self._lost
        return f"replica {rank} of {self.size}: {text}"

    def _open_hub(self, port: int, seconds: float) -> Hub:
        try:
            return Hub(port, self.size, seconds)
        except OSError as error:
            reason = f"port {port} can't be listened to here: {error.strerror or error}"
            works = "a free port, the same on all replicas"
            subject = f"--data-parallel-rpc-port {port}"
            raise Refused([Refusal("core", subject, reason, works)]) from error

    def _connect(self, host: str, port: int) -> Line:
        end = time.monotonic() + MEET_S
        while True:
            try:
                sock = socket.create_connection((host, port), timeout=_CONNECT_S)
                sock.settimeout(None)
                line = Line(sock)
                line.send("hello", VERSION, self.size, self.rank)
                return line
            except (OSError, LineClosedError) as error:
                if time.monotonic() > end:
                    reason = f"no replica 0 at {self._place} within {MEET_S:g} s: {error}"
                    works = f"{RANK} 0 on that host; --data-parallel-address and -rpc-port name it"
                    subject = f"--data-parallel-address {host}"
                    raise Refused([Refusal("core", subject, reason, works)]) from error
                time.sleep(_RETRY_S)

    def _answer(self, word: str, value: Any, seconds: float | None = None) -> Any:
        """What the hub answers, once all have said the same word. ``TimeoutError``."""
        with self._changed:
            self.check()
            try:
                self._line.send(word, value)
            except LineClosedError as error:
                self._lose(0, LOST, str(error))
            if not self._changed.wait_for(lambda: self._answers or self._lost, seconds):
                raise TimeoutError
            if not self._answers:
                self.check()
            return self._answers.pop()

    # What follows runs in the thread.

    def _listen(self) -> None:
        try:
            while True:
                for message in self._line.receive():
                    self._heard(message)
        except (LineClosedError, OSError) as error:
            with self._changed:
                self._lose(0, LOST, f"{error}: its process or its host has ended")
        self._tell()

    def _heard(self, message: Message) -> None:
        word, *more = message
        with self._changed:
            if word == "call":
                self._called = True
            elif word in ("go", "all"):
                self._called = False if word == "go" else self._called
                self._quiet()
                self._answers.append(more[0])
            elif word == "lost":
                self._lose(*more)
            elif word == "no":
                self._lose(self.rank, LAUNCH, more[0])
            self._changed.notify_all()
        if self.pending:
            self._tell()

    def _lose(self, rank: int, code: str, text: str) -> None:
        if self._lost is None:
            self._lost = (rank, code, text)
        self._changed.notify_all()

    def _tell(self) -> None:
        """Those who wait that it is ``pending``."""
        with self._changed:
            if not self._rung and not self._closing:
                self._rung = True
                os.write(self._ring, b"!")
        for callback in self._watchers:
            callback()

    def _quiet(self) -> None:
        if self._rung and not self.pending:
            self._rung = False
            os.read(self.alarm, 1)

    def _release(self) -> None:
        if self._hub is not None:
            self._hub.close()
        os.close(self.alarm)
        os.close(self._ring)
