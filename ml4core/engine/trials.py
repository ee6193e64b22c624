"""Steps that are run before there are requests: to have kernels compiled, to see what steps take,
and to have them captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from ml4core.api import CapturingExecutor, DeviceMemory, StepShape
from ml4core.engine.padding import StepSizes, padding_step
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.steps import StepRunner

Told = Callable[[str, int, int], None]
"""Told what goes on, how many steps of it are done, and of how many."""

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95)
"""What takes most of those that requests ask for: a draw, among tokens that have to be ordered."""

_ODD_ROWS = (2, 3, 17, 100)
_FEW_REQUESTS = (1, 2, 3, 16, 17)
_TOLD_EACH_S = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """A step that was measured: ``nbytes`` is the most that was allocated while it ran, beside
    what was before; ``peak`` is both.
    """

    name: str
    rows: int
    requests: int
    pages: int
    nbytes: int
    peak: int
    seconds: float


class Trials:
    """Runs steps of padding."""

    def __init__(
        self,
        steps: StepRunner,
        sizes: StepSizes,
        device: str,
        others: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        """``others``: calls by name that are tried beside steps."""
        self.sizes = sizes
        self._others = dict(others or {})
        self._steps = steps
        self._device = device

    def run(self, shape: StepShape, params: SamplingParams = GREEDY) -> None:
        """One step to its end. Raises as a step does."""
        step = padding_step(shape, self._device, params, self.sizes.sequences)
        self._steps.launch(step).result()

    def warm_up(self, eager: bool, told: Told | None = None) -> int:
        """Runs steps of many sizes, so that what is compiled for one is there; ``eager``: those
        without a chunk of a prompt, too, which are captured otherwise. Returns their count.
        """
        shapes = list(dict.fromkeys(self._warming(eager)))
        drawn: set[int] = set()
        for done, shape in enumerate(shapes):
            if told is not None:
                told("warming up", done, len(shapes))
            self.run(shape)
            if shape.logits not in drawn:  # draws depend on nothing else of a shape
                drawn.add(shape.logits)
                self.run(shape, DRAWN)
        for call in self._others.values():
            call()
        if told is not None:
            told("warming up", len(shapes), len(shapes))
        return len(shapes) + len(drawn)

    def _warming(self, eager: bool) -> Iterator[StepShape]:
        sizes = self.sizes
        widest = sizes.pages(sizes.longest)
        counts = {*_ODD_ROWS, *(1 << n for n in range(1, sizes.rows.bit_length())), sizes.rows}
        for rows in sorted(count for count in counts if count <= sizes.rows):
            pages = {sizes.pages(rows), widest} if sizes.buckets.pages else {sizes.pages(rows)}
            for width in sorted(pages):
                yield sizes.with_chunk(0, rows, width)
        for requests in self._beside():
            yield sizes.with_chunk(requests, sizes.rows, widest)
        if eager:
            for requests in sorted({*_FEW_REQUESTS, sizes.sequences}):
                if requests <= min(sizes.sequences, sizes.rows // sizes.window):
                    for width in sorted({sizes.pages(1), widest}):
                        yield sizes.uniform(requests, width)

    def _beside(self) -> Iterable[int]:
        """Requests that run beside a chunk: one, and as many as there can be."""
        most = min(self.sizes.sequences - 1, (self.sizes.rows - 1) // self.sizes.window)
        return sorted({min(1, most), most} - {0})

    def largest(self) -> dict[str, StepShape]:
        """The steps that take most, by name."""
        sizes = self.sizes
        widest = sizes.pages(sizes.longest)
        found = {"prefill": sizes.with_chunk(0, sizes.rows, widest)}
        most = max(self._beside(), default=0)
        if most:
            found["mixed"] = sizes.with_chunk(most, sizes.rows, widest)
        requests = min(sizes.sequences, max(1, sizes.rows // sizes.window))
        found["decode" if sizes.window == 1 else "verify"] = sizes.uniform(requests, widest)
        return found

    def measure(self, memory: DeviceMemory) -> list[Trial]:
        """What the largest steps take."""
        found = []
        for name, shape in self.largest().items():
            size = (shape.rows, shape.requests, shape.pages[0][1])
            found.append(Trial(name, *size, *_taken(memory, partial(self.run, shape, DRAWN))))
        for name, call in self._others.items():
            found.append(Trial(name, 0, 0, 0, *_taken(memory, call)))
        return found

    def captured(self, executor: object) -> list[StepShape]:
        """The shapes that an executor captures, largest first; none for one that captures none."""
        if not hasattr(executor, "captures_shape"):
            return []
        capturing: CapturingExecutor = executor  # type: ignore[assignment]
        sizes = self.sizes
        counts = sizes.buckets.decode if sizes.window == 1 else sizes.buckets.verify
        most = sizes.buckets.padded("decode" if sizes.window == 1 else "verify", sizes.sequences)
        widest = sizes.pages(sizes.longest)
        shapes = [
            sizes.uniform(requests, pages)
            for requests in counts
            for pages in sizes.buckets.pages
            if requests <= most and pages <= widest
        ]
        shapes.sort(key=lambda shape: (shape.rows, shape.pages[0][1]), reverse=True)
        return [shape for shape in shapes if capturing.captures_shape(shape)]

    def capture(self, shapes: list[StepShape], told: Told | None = None) -> None:
        """Runs each shape twice: as it is, and captured."""
        last = perf_counter()
        for done, shape in enumerate(shapes):
            if told is not None:
                told("capturing graphs", done, len(shapes))
            if perf_counter() - last > _TOLD_EACH_S:
                last = perf_counter()
                _logger.info("captured %d of %d step sizes", done, len(shapes))
            self.run(shape)
            self.run(shape)
        if told is not None and shapes:
            told("capturing graphs", len(shapes), len(shapes))


def _taken(memory: DeviceMemory, call: Callable[[], object]) -> tuple[int, int, float]:
    """Bytes, beside what was allocated before and with it, and seconds of a call."""
    memory.reset_peak()
    before, started = memory.figures(), perf_counter()
    call()
    peak = memory.figures().peak
    return peak - before.allocated, peak, perf_counter() - started
