"""Times of a call on a device: in a graph, inputs rotated, medians of repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

_CACHED = 256 << 20
"""Bytes that inputs rotate through: several times the second-level cache of any GPU served."""
_HELD = 16 << 30
"""Bytes that all sets of inputs may take together."""
_MOST = 512
"""Calls of a graph, about."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one call, over repeats.

    Attributes:
        calls: in one graph.
    """

    median_us: float
    least_us: float
    most_us: float
    calls: int

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


class Timer:
    """Times calls on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def copies(self, touched: int, held: int) -> int:
        """How many sets of inputs make a rotation: each takes ``held`` bytes, of which a call
        touches so many.
        """
        wanted = -(-_CACHED // max(1, touched))
        return max(2, min(wanted, _HELD // max(1, held), _MOST))

    def time(
        self, calls: Sequence[Callable[[], object]], repeats: int = 15, least: int = 16
    ) -> Times:
        """Each of ``calls`` is the same work on inputs of its own; all go into one graph, several
        times over if they are fewer than ``least``.
        """
        found = self.spans(calls, repeats, least)
        count = len(calls) * max(1, -(-least // len(calls)))
        return Times(median(found), min(found), max(found), count)

    def spans(
        self, calls: Sequence[Callable[[], object]], repeats: int, least: int = 16
    ) -> list[float]:
        """Microseconds of one call, for each repeat."""
        queue = list(calls) * max(1, -(-least // len(calls)))
        graph = self.graph(queue, calls)
        for _ in range(3):
            graph.replay()
        found = []
        for _ in range(repeats):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            found.append(first.elapsed_time(last) * 1e3 / len(queue))
        return found

    def graph(
        self, queue: Sequence[Callable[[], object]], warm: Sequence[Callable[[], object]]
    ) -> torch.cuda.CUDAGraph:
        """The calls of ``queue`` as one graph, after those of ``warm`` ran once."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))  # inputs may still be made there
        with torch.cuda.stream(side):
            for call in warm:  # compiles, and makes handles
                call()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for call in queue:
                call()
        return graph

    def kernels(self, calls: Sequence[Callable[[], object]], replays: int = 5) -> dict[str, float]:
        """Microseconds of one call by kernel, as the profiler has them."""
        from torch.profiler import ProfilerActivity, profile

        graph = self.graph(calls, calls)
        graph.replay()
        torch.cuda.synchronize(self.device)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(replays):
                graph.replay()
            torch.cuda.synchronize(self.device)
        count = replays * len(calls)
        found: dict[str, float] = {}
        for event in seen.events():
            if event.device_time_total and "Graph" not in event.name:
                found[event.name] = found.get(event.name, 0.0) + event.device_time_total / count
        ordered = sorted(found.items(), key=lambda one: -one[1])
        return {name[:80]: round(us, 3) for name, us in ordered[:30]}

    def copy_rate(self) -> float:
        """Bytes a second of a large copy, those read and those written: the measured ceiling."""
        # By a kernel: in a graph, a plain copy is one of the copy engine's, which is slower.
        source = torch.empty(1 << 28, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        times = self.time([lambda: torch.neg(source, out=target)], repeats=5)
        return 2 * source.nbytes / (times.median_us * 1e-6)
