"""The start of an engine on a device with memory of its own: steps are tried, caches get what is
left of the process's share, and graphs are captured; then all of it is held against the plan.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from ml4core import registry
from ml4core.api import DeviceMemory, MemoryFigures
from ml4core.engine.memory_plan import (
    UTILIZATION,
    Account,
    Profile,
    available,
    beside_tensors,
    size_text,
)
from ml4core.engine.runner import ModelRunner
from ml4core.engine.trials import Told, Trial, Trials
from ml4core.planning.kv import NULL_PAGES, KVGroup, Pools

_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+ [KMGT]?i?B)")
_SMALLER = "a smaller --max-num-batched-tokens, --max-num-seqs or --max-model-len"
_MORE_GRAPHS = 5
_FEWER_GRAPHS = "fewer --cudagraph-capture-sizes, or --enforce-eager"

_logger = logging.getLogger(__name__)


@dataclass
class Timings:
    """Seconds of the host for each part of a start; and how often it was done."""

    warm_up_s: float = 0.0
    warm_up_steps: int = 0
    profile_s: float = 0.0
    capture_s: float = 0.0
    captures: int = 0


@dataclass
class StartUp:
    """A start on one device, from before its weights are loaded.

    Attributes:
        before: figures then.
        later: bytes that requests will have kept between steps, and that no trial shows.
        trials: what the largest steps took.
    """

    memory: DeviceMemory
    before: MemoryFigures
    later: int = 0
    timings: Timings = field(default_factory=Timings)
    trials: list[Trial] = field(default_factory=list)
    profile: Profile | None = None
    account: Account | None = None

    @classmethod
    def begin(cls, memory: DeviceMemory, later: int = 0) -> StartUp:
        _tidy(memory)
        return cls(memory, memory.figures(), later)

    @contextmanager
    def loading(self, nbytes: int) -> Iterator[None]:
        """Around the loading of weights of so many bytes."""
        with told_when_full(
            self.memory, "loading the weights", "a device with more memory", nbytes
        ):
            yield

    def run(
        self,
        runner: ModelRunner,
        trials: Trials,
        groups: Sequence[KVGroup],
        size_pools: Callable[[Profile], Pools],
        warm: bool = True,
        told: Told | None = None,
    ) -> Pools:
        """Allocates caches in ``runner``, whose weights are loaded, and has everything compiled and
        captured.

        Args:
            size_pools: the caches, given what the process takes beside them.
            warm: whether steps of all kinds are to be compiled; else those that are measured or
                captured are.
        """
        with told_when_full(self.memory, "a step of the largest size", _SMALLER):
            self.profile = self._tried(runner, trials, groups, warm, told)
        pools = size_pools(self.profile)
        _logger.info(
            "%d steps tried in %.1f s, the largest measured in %.1f s; caches of %s for %d tokens",
            self.timings.warm_up_steps,
            self.timings.warm_up_s,
            self.timings.profile_s,
            size_text(pools.nbytes),
            pools.tokens,
        )
        _tidy(self.memory)
        empty = self.memory.figures()
        with told_when_full(self.memory, "the caches", f"a smaller {UTILIZATION}", pools.nbytes):
            runner.allocate_kv(pools)
        allocated = self.memory.figures()
        shapes = trials.captured(runner.session.executor)
        works = f"a smaller {UTILIZATION}, {_FEWER_GRAPHS}"
        with told_when_full(self.memory, "capturing graphs", works):
            graphs = self._captured(trials, shapes, told)
        with told_when_full(self.memory, "a step beside the caches", f"a smaller {UTILIZATION}"):
            self._settle(trials, allocated.allocated - empty.allocated, pools, graphs)
        return pools

    def _tried(
        self,
        runner: ModelRunner,
        trials: Trials,
        groups: Sequence[KVGroup],
        warm: bool,
        told: Told | None,
    ) -> Profile:
        """What the process takes beside caches; tried with caches of a page."""
        memory, executor = self.memory, runner.session.executor
        loaded, started = memory.figures(), perf_counter()
        fewest = {group.name: NULL_PAGES + 1 for group in groups}
        runner.allocate_kv(Pools(tuple(groups), fewest, trials.sizes.block_size))
        trial_caches = memory.figures().allocated - loaded.allocated
        shapes = trials.captured(executor)
        if warm:
            self.timings.warm_up_steps = trials.warm_up(not shapes, told)
            self.timings.warm_up_s = perf_counter() - started
        started = perf_counter()
        self.trials = trials.measure(memory)
        most = max(trial.peak for trial in self.trials)
        _tidy(memory)
        with told_when_full(memory, "capturing graphs", _FEWER_GRAPHS):
            graphs = self._graph_bytes(trials, shapes)
        runner.free_kv()
        if shapes:
            executor.drop()  # type: ignore[attr-defined]  # of a capturing one
        _tidy(memory)
        self.timings.profile_s = perf_counter() - started
        now = memory.figures()
        return Profile(
            total=now.total,
            others=self.before.allocated,
            weights=loaded.allocated - self.before.allocated,
            activations=max(0, most - trial_caches - loaded.allocated) + self.later,
            runtime=max(0, self._grown(now)),
            graphs=graphs,
            # What is held beside tensors, even now, lies in pieces, or in graphs of another engine.
            available=now.free + now.allocated - self.before.allocated,
        )

    def _graph_bytes(self, trials: Trials, shapes: Sequence[Any]) -> int:
        """What the graphs of these shapes will take: the largest, and as much as a few of the next
        take on average for each other one. A device gives memory in pieces, so one tells little.
        """
        before = beside_tensors(self.memory.figures())
        taken: list[int] = []
        for some in (shapes[:1], shapes[1:_MORE_GRAPHS]):
            trials.capture(list(some))
            _tidy(self.memory)
            taken.append(max(0, beside_tensors(self.memory.figures()) - before))
        first, all_tried = taken
        others = max(0, all_tried - first)
        return first + others * max(0, len(shapes) - 1) // max(1, len(shapes[1:_MORE_GRAPHS]))

    def _grown(self, figures: MemoryFigures) -> int:
        """What is in use beside tensors, and wasn't before the start."""
        return beside_tensors(figures) - beside_tensors(self.before)

    def _captured(self, trials: Trials, shapes: list[Any], told: Told | None) -> int:
        if not shapes:
            return 0
        _tidy(self.memory)
        before, started = beside_tensors(self.memory.figures()), perf_counter()
        trials.capture(shapes, told)
        self.timings.capture_s = perf_counter() - started
        self.timings.captures = len(shapes)
        _tidy(self.memory)
        nbytes = max(0, beside_tensors(self.memory.figures()) - before)
        _logger.info(
            "captured %d step sizes in %.1f s, %s",
            len(shapes),
            self.timings.capture_s,
            size_text(nbytes),
        )
        return nbytes

    def _settle(self, trials: Trials, cache_bytes: int, pools: Pools, graphs: int) -> None:
        """Runs the largest steps once more, and holds what all took against the plan."""
        profile, memory = self.profile, self.memory
        assert profile is not None, "caches are sized by it"
        most = max(trial.peak for trial in trials.measure(memory))
        _tidy(memory)
        beside = profile.others + profile.weights + cache_bytes
        real = {
            "weights": profile.weights,
            "activations": max(0, most - beside) + self.later,
            "runtime": max(0, self._grown(memory.figures()) - graphs),
            "graphs": graphs,
            "pools": cache_bytes,
        }
        planned = {
            "weights": profile.weights,
            "activations": profile.activations,
            "runtime": profile.runtime,
            "graphs": profile.graphs,
            "pools": pools.nbytes,
        }
        self.account = Account(planned, real)
        for warning in self.account.warnings():
            _logger.warning("%s", warning)

    def report(self, utilization: float, estimates: Mapping[str, int]) -> dict[str, Any]:
        """For the start-up report. ``estimates``: the planner's, by name."""
        figures = self.memory.figures()
        found: dict[str, Any] = {"total": figures.total, "free": figures.free}
        found["utilization"] = utilization
        found["share"] = int(figures.total * utilization)
        if self.account is not None:
            found |= self.account.to_json()
        for name, nbytes in estimates.items():
            if name in found:
                found[name]["estimate"] = nbytes
        found["steps"] = [asdict(trial) for trial in self.trials]
        return found


class DeviceFullError(MemoryError):
    """Memory of the device ran out; the text says for what."""


@contextmanager
def told_when_full(
    memory: DeviceMemory, what: str, works: str, needed: int | None = None
) -> Iterator[None]:
    """Makes whatever says that memory ran out a ``DeviceFullError`` that names what needed it, how
    much, what is free, and what would work.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, DeviceFullError) or not registry.lacks_memory(error):
            raise
        asked = _ASKED.search(str(error))
        amount = asked[1] if asked else "more than there is"
        if needed is not None:
            amount = size_text(needed)
        figures = memory.figures()
        free, total = size_text(max(0, available(figures))), size_text(figures.total)
        raise DeviceFullError(
            f"{what} needs {amount}, and {free} of {total} are free (works: {works})"
        ) from error


def _tidy(memory: DeviceMemory) -> None:
    gc.collect()
    memory.release()
