"""All ranks of a deployment, as rank 0 has them: started, told, watched and ended together."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ml4core.api import Device, Fault
from ml4core.engine.args import EngineArgs
from ml4core.engine.ranks import group
from ml4core.engine.ranks.calls import Begin, Call
from ml4core.engine.ranks.devices import device_of
from ml4core.engine.ranks.failures import (
    LOST,
    Failure,
    RankLostError,
    failure_of,
    one_error,
    one_fault,
)
from ml4core.engine.ranks.processes import (
    CLOSE_S,
    SETTLE_S,
    Heard,
    RankProcess,
    stop,
    tell,
)

T = TypeVar("T")


class Ranks:
    """The ranks of an engine on this machine. Rank 0 is this process.

    Attributes:
        place: rank 0's.
        size: of all in this replica; 1 where it only meets those of other replicas.
        devices: by rank.
    """

    def __init__(
        self,
        args: EngineArgs,
        backend: str,
        devices: Sequence[Device],
        place: group.Place,
        store: dist.TCPStore | None,
    ) -> None:
        """Starts the others, which know nothing of the group yet.

        Args:
            args: with the model as a local folder.
            place: rank 0's.
            store: where all meet, if it lives in this process.
        """
        self.place = place
        self.size = size = place.size
        self.devices = tuple(device_of(devices, rank) for rank in range(size))
        self._device = torch.device(self.devices[0].torch_device)
        self._number = 0
        self._calling = False  # in a call of all ranks; one that was broken off stays so
        self._sound = True
        self._joined = False
        self._asked_to_stop = False
        self._undo = ExitStack()
        self._undo.enter_context(group.environment(self._device, place.host))
        before = torch.get_num_threads()
        threads = max(1, before // size)
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
            self._undo.callback(torch.set_num_threads, before)
        self._processes: list[RankProcess] = []
        # Also where nobody closes: a process that ends ends its ranks before its libraries.
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            self._store = store
            for rank, device in enumerate(self.devices[1:], 1):
                begin = Begin(args, backend, device, place._replace(rank=rank), threads)
                self._processes.append(RankProcess(begin))
            self._heard = Heard(self._processes, _aborter(self._device))
        except BaseException:
            self._end()
            self._undo.close()
            raise

    @property
    def alarm(self) -> int:
        """A descriptor that can be read from once a rank has failed."""
        return self._heard.alarm

    def join(self) -> None:
        """Makes the group, of ranks that have answered before: one that can't even start must not
        be waited for there.
        """
        self._joined = True
        self.alongside("join", lambda: group.join(self.place, self._device, self._store))

    def tell(self, name: str, *arguments: Any) -> None:
        """Has all others make a call of ``Worker`` that this process makes, too."""
        tell(self._processes, Call(name, arguments))

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """What the others answer, by rank."""
        return self._heard.answers(self._asked(name, arguments), len(self._processes))

    def alongside(self, name: str, own: Callable[[], T], *arguments: Any) -> tuple[T, list[Any]]:
        """What ``own`` returns, and what the others answer who make the call meanwhile."""
        number = self._asked(name, arguments)
        try:
            found = own()
        except BaseException:
            self._sound = False  # they may wait for this rank
            raise
        return found, self._heard.answers(number, len(self._processes))

    def check(self) -> None:
        """Raises ``RankLostError`` once a rank has failed."""
        self._heard.check()

    def fault(self, step: int, seconds: float = 0.0) -> Fault | None:
        """Why the ranks serve no more; None while they do, as far as is known after ``seconds``."""
        if self._calling:
            text = "a call of all ranks was broken off in this process: they are out of step"
            return Fault(LOST, text, step)
        failures = self._heard.failures if not seconds else self._heard.settled(seconds)
        return one_fault(self._heard.settled(0.0), self.size, step) if failures else None

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around a call that all ranks make. Broken off, as by Ctrl-C, it is the last."""
        self._calling = True
        try:
            yield
        except Exception:
            self._calling = self._sound = False
            raise
        self._calling = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do as the engine starts: whatever goes wrong comes out as one
        error, with the names of those where it did.
        """
        clean = False
        try:
            yield
            clean = True
        except Exception as error:
            own = failure_of(error, 0, time.monotonic())
            failures: list[Failure] = self._heard.settled(SETTLE_S)
            if not failures and not isinstance(error, RankLostError):
                raise
            if not isinstance(error, RankLostError):
                failures.append(own)
            raise one_error(failures or [own], self.size) from error
        finally:
            self._sound = self._sound and clean

    def report(self, sums: str | None) -> Mapping[str, Any]:
        """For the start-up report. ``sums``: who joins partial results; None: torch."""
        processes = [os.getpid(), *(one.process.pid for one in self._processes)]
        return {
            "ranks": [
                {"rank": rank, "device": device.torch_device, "name": device.name, "process": pid}
                for rank, (device, pid) in enumerate(zip(self.devices, processes, strict=True))
            ],
            "sums": sums or group.sums(),
        }

    def ask_to_stop(self) -> None:
        """Has the others close, while this process does."""
        if self.in_order and not self._asked_to_stop:
            self._heard.expect_the_end()
            stop(self._processes, Call("stop"))
        self._asked_to_stop = True

    def kill(self) -> None:
        """Ends the others at once: a call that waits for one of them ends, too."""
        self._sound = False
        self._heard.expect_the_end()
        for one in self._processes:
            one.process.kill()

    def close(self, inside: bool = False) -> None:
        """Ends the others: in order, if they are in order. ``inside``: a call still runs in the
        group, which must be left to it. May be called twice.
        """
        if not self._end.alive:
            return
        self._sound = self.in_order and not inside
        self.ask_to_stop()
        self._heard.expect_the_end()
        if self._sound and self._joined:
            group.leave()
        for one in self._processes:
            one.end(CLOSE_S if self._sound else 0.0)
        self._heard.close()
        self._end()
        if self._joined and not inside:
            group.leave()
        self._undo.close()

    @property
    def in_order(self) -> bool:
        """Whether all ranks would answer: none has failed, and no call was broken off."""
        return self._sound and not self._calling and not self._heard.failures

    def _asked(self, name: str, arguments: tuple[Any, ...]) -> int:
        self._number += 1
        tell(self._processes, Call(name, arguments, self._number))
        return self._number


def _end(processes: Sequence[RankProcess]) -> None:
    for one in processes:
        one.end(0.0)
        one.connection.close()


def _aborter(device: torch.device) -> Callable[[], None]:
    return (lambda: None) if device.type == "cpu" else group.abort
