"""Ranks as threads of one process: what several devices compute, on one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Meeting:
    """Where all ranks bring something and take what all have brought. Between meetings they work
    one after the other, as what a backend does in one process need not be safe beside itself.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._brought: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._brought[rank] = x
        self.turn.release()
        try:
            self._barrier.wait()
            found = [one for one in self._brought if one is not None]
            self._barrier.wait()  # no rank brings the next one before all have these
        finally:
            self.turn.acquire()
        return found

    def leave(self) -> None:
        """Ends the wait of all others with ``threading.BrokenBarrierError``."""
        self._barrier.abort()


class ThreadRank:
    """The ``Collectives`` of one thread. Sums are in the order of ranks, in the tensor's dtype."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world_size = meeting.size

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._meeting.exchange(self.rank, x)
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, x), dim)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        return self._chunks(self.all_reduce(x), dim)[self.rank]

    def all_to_all(self, x: Tensor, dim: int = 0) -> Tensor:
        brought = self._meeting.exchange(self.rank, x)
        return torch.cat([self._chunks(one, dim)[self.rank] for one in brought], dim)

    def _chunks(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        if x.shape[dim] % self.world_size:
            raise ValueError(
                f"{x.shape[dim]} rows along axis {dim} don't divide among {self.world_size} ranks"
            )
        return x.chunk(self.world_size, dim)


def run_ranks(size: int, work: Callable[[ThreadRank], T], timeout_s: float = 600.0) -> list[T]:
    """What ``work`` gives on each of ``size`` ranks, in their order. All must make the same calls
    of collectives; one that the others wait for longer than ``timeout_s`` ends them all.

    Raises what the first rank to fail has raised.
    """
    meeting = _Meeting(size, timeout_s)
    found: dict[int, T] = {}
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                found[rank] = work(ThreadRank(meeting, rank))
            except BaseException as error:
                failed.append(error)
                meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        broken = threading.BrokenBarrierError
        raise next((one for one in failed if not isinstance(one, broken)), failed[0])
    return [found[rank] for rank in range(size)]
