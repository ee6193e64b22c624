"""The processes of the other ranks, and what is heard of them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from ml4core.engine.ranks.calls import Answer, Begin, Call
from ml4core.engine.ranks.failures import LOST, Failure, RankLostError

# This process's path comes first: it decides which `ml4core` and which plugins the child sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ml4core.engine.ranks.worker import main; main(int(sys.argv[2]))"
)
CLOSE_S = 10.0
"""How long ranks may take to close before they are killed."""
SETTLE_S = 1.0
"""How long others are waited for that may have failed before: what is seen first is often not the
cause.
"""
_STDERR = 2


class RankProcess:
    """A rank's process, whose stdin closes when this one ends."""

    def __init__(self, begin: Begin) -> None:
        self.rank = begin.place.rank
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())]
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": str(begin.threads)},
            )
        self.connection = Connection(ours.detach())
        self.connection.send(begin)

    def obituary(self) -> Failure:
        """Of one that has closed its connection without a word."""
        pid = self.process.pid
        try:
            code = self.process.wait(SETTLE_S)
        except subprocess.TimeoutExpired:
            told = "has closed its connection"
        else:
            told = f"ended with code {code}"
            if code < 0:
                names = {one.value: one.name for one in signal.Signals}  # real-time ones have none
                told = f"was ended by {names.get(-code, f'signal {-code}')}"
        return Failure(self.rank, LOST, f"its process {pid} {told}")

    def end(self, seconds: float) -> None:
        """Waits for its end, and kills it then."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


class Heard:
    """What ranks have said, collected by a thread.

    Attributes:
        failures: of ranks that have ended.
        alarm: a descriptor that can be read from once there is a failure.
    """

    def __init__(self, processes: Sequence[RankProcess], on_failure: Callable[[], None]) -> None:
        self.failures: list[Failure] = []
        self._answers: dict[int, dict[int, Any]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._on_failure = on_failure
        self._processes = {one.connection: one for one in processes}
        self.alarm, self._ring = os.pipe()
        self._quit, self._quitting = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="ml4core-ranks", daemon=True)
        self._thread.start()

    def answers(self, number: int, ranks: int) -> list[Any]:
        """Those of so many ranks to a call, in their order. Raises ``RankLostError`` once one has
        failed.
        """
        with self._changed:
            while len(self._answers.get(number, ())) < ranks:
                self._check()
                self._changed.wait()
            found = self._answers.pop(number, {})
        return [found[rank] for rank in sorted(found)]

    def check(self) -> None:
        """Raises ``RankLostError`` once a rank has failed."""
        with self._changed:
            self._check()

    def settled(self, seconds: float) -> list[Failure]:
        """The failures, once there were none for some time, or some at all and all have come that
        came with them.
        """
        with self._changed:
            if not self.failures:
                self._changed.wait_for(lambda: self.failures, seconds)
            if self.failures:
                self._changed.wait(SETTLE_S / 10)
            return list(self.failures)

    def expect_the_end(self) -> None:
        """From now on an end is no failure."""
        with self._changed:
            self._closing = True

    def close(self) -> None:
        self.expect_the_end()
        os.close(self._quitting)
        self._thread.join()
        for descriptor in (self._quit, self.alarm, self._ring):
            os.close(descriptor)

    def _check(self) -> None:
        if self.failures:
            raise RankLostError(self.failures[0].text)

    def _listen(self) -> None:
        open = dict(self._processes)
        while open:
            for ready in wait([*open, self._quit]):
                if ready == self._quit:
                    return
                assert isinstance(ready, Connection)
                heard = self._hear(ready, open[ready])
                if not isinstance(heard, Answer):
                    del open[ready]

    def _hear(self, connection: Connection, process: RankProcess) -> object:
        try:
            heard = connection.recv()
        except (EOFError, OSError):
            heard = process.obituary()
        with self._changed:
            if isinstance(heard, Answer):
                self._answers.setdefault(heard.number, {})[process.rank] = heard.value
            elif not self._closing:
                first = not self.failures
                self.failures.append(heard)
                if first:
                    os.write(self._ring, b"!")
                    threading.Thread(target=self._on_failure, daemon=True).start()
            self._changed.notify_all()
        return heard


def tell(processes: Sequence[RankProcess], call: Call) -> None:
    """Raises ``RankLostError`` for one that doesn't listen any more."""
    data = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)  # once, for all of them
    for one in processes:
        try:
            one.connection.send_bytes(data)
        except OSError as error:
            raise RankLostError(f"rank {one.rank} has gone") from error


def stop(processes: Sequence[RankProcess], call: Call) -> None:
    """As ``tell``, to those who listen."""
    for one in processes:
        with suppress(OSError):
            one.connection.send(call)
