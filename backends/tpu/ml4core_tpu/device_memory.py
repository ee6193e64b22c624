"""The memory of a session's devices, as their runtime tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ml4core.api import MemoryFigures

Stats = Mapping[str, int]
_FULL = "RESOURCE_EXHAUSTED"


@contextmanager
def told_when_full(what: str) -> Iterator[None]:
    """What JAX raises for memory that ran out has no type of its own. It becomes a ``MemoryError``
    that begins with ``what``; any other fault stays as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if _FULL not in str(error):
            raise
        raise MemoryError(f"{what}: {error}") from error


def told_memory(devices: Sequence[Any]) -> TpuMemory | None:
    """None where the runtime tells nothing, as that of the host."""
    reads = [device.memory_stats for device in devices]
    return TpuMemory(reads) if all(read() for read in reads) else None


class TpuMemory:
    """Figures of the fullest of a process's devices: all have the same share of each layer, and the
    first has the drafter, too.
    """

    def __init__(self, reads: Sequence[Callable[[], Stats]]) -> None:
        """``reads``: of each device, what gives its ``memory_stats``."""
        self._reads = reads

    def figures(self) -> MemoryFigures:
        stats = [read() for read in self._reads]
        total = min(one["bytes_limit"] for one in stats)
        used = max(one["bytes_in_use"] for one in stats)
        # What the allocator keeps for its own comes off what it would give.
        kept = max(one.get("bytes_reserved", 0) for one in stats)
        peak = max(one.get("peak_bytes_in_use", one["bytes_in_use"]) for one in stats)
        return MemoryFigures(total, max(0, total - used - kept), used, used, peak)

    def reset_peak(self) -> None:
        """JAX's peak is that of the process: it only grows, and weights and caches are below it. So
        the largest step that was tried is what it tells, as is wanted.
        """

    def release(self) -> None:
        """JAX keeps nothing for later."""
