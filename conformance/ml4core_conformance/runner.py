"""Runs checks in worker processes: one that crashes or hangs costs its own verdict alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

from ml4core.cli.signals import Terminated
from ml4core_conformance.check import Check, Status
from ml4core_conformance.judge import DEVICE_LOST, judge_unit, spoilt
from ml4core_conformance.processes import Process, died, last_words
from ml4core_conformance.results import CheckResult
from ml4core_conformance.target import NO_DEVICE, Target, Unloadable
from ml4core_conformance.worker import BROKEN, CLOSING_S, DONE, READY, RESULT, UNUSABLE

START_S = 180.0
"""Seconds in which a worker must have loaded the plugin."""
GRACE_S = 1.0
"""Seconds in which a worker that is late dumps its stack."""

INTERRUPTED = "the run was interrupted"

TRIES = 3
"""Fresh workers in a row that can't use the device, after which it counts as dead for good."""

Observer = Callable[[CheckResult], None]


@dataclass(frozen=True)
class Outcome:
    """What became of each check, in the order that was given; ``complete`` unless interrupted."""

    results: tuple[CheckResult, ...]
    complete: bool
    seconds: float
    jobs: int


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def default_jobs(target: Target) -> int:
    """As many as there are cores; four at most where the device is not the host's processor."""
    return cores() if target.device.torch_device == "cpu" else min(cores(), 4)


def run(
    target: Target,
    checks: Sequence[Check],
    *,
    jobs: int | None = None,
    observe: Observer = lambda result: None,
    absent: str = "",
    enough: Callable[[CheckResult], bool] = lambda result: False,
) -> Outcome:
    """Judges the target by each check.

    Args:
        jobs: worker processes; 0 runs all in this process, where nothing is isolated; None takes
            ``default_jobs``.
        observe: is told each result as it comes. One that a later event spoils comes twice.
        absent: why there is no device, where the target's is ``NO_DEVICE``.
        enough: says of a result whether the run may end with it; what is left is NOT-RUN.

    ``KeyboardInterrupt`` or ``Terminated`` ends the run early: checks without a verdict are then
    NOT-RUN.
    """
    jobs = default_jobs(target) if jobs is None else jobs
    start = time.monotonic()
    found: dict[str, CheckResult] = {}

    def keep(result: CheckResult) -> None:
        found[result.id] = result
        observe(result)
        if enough(result):
            raise _Enough

    complete = True
    try:
        due = list(checks)
        if target.device == NO_DEVICE:
            due = [check for check in checks if check.profile == "plugin"]
            for check in checks:
                if check.profile != "plugin":
                    keep(CheckResult.of(check, Status.NOT_RUN, f"no device here: {absent}"))
        if jobs == 0:
            _run_here(target, due, keep)
        else:
            for exclusive, phase in groupby(_exclusive_last(due), _exclusive):
                _Pool(target, units(phase), 1 if exclusive else jobs, keep).run()
    except (KeyboardInterrupt, Terminated):
        complete = False
    except _Enough:
        pass
    why = "not needed" if complete else INTERRUPTED
    for check in checks:
        if check.id not in found:
            found[check.id] = CheckResult.of(check, Status.NOT_RUN, why)
    results = tuple(found[check.id] for check in checks)
    return Outcome(results, complete, time.monotonic() - start, jobs)


class _Enough(Exception):
    """The run may end."""


def units(checks: Iterable[Check]) -> list[list[Check]]:
    """Checks that share work, together; those to be isolated alone. In order of appearance."""
    found: dict[str, list[Check]] = {}
    for check in checks:
        key = f"alone:{check.id}" if check.isolated or not check.unit else f"unit:{check.unit}"
        found.setdefault(key, []).append(check)
    return list(found.values())


def _exclusive(check: Check) -> bool:
    """Whether nothing else may run meanwhile: times are measured."""
    return check.profile == "perf"


def _exclusive_last(checks: Iterable[Check]) -> list[Check]:
    return sorted(checks, key=_exclusive)


def _run_here(target: Target, checks: Sequence[Check], keep: Observer) -> None:
    backend, suite = target.load(), target.suite()
    if isinstance(backend, Unloadable):
        checks = [check for check in checks if check.profile == "plugin"]
    for unit in units(_exclusive_last(checks)):
        if unit[0].isolated:
            reason = "may crash or hang, and needs a process of its own; --jobs 1 gives one"
            keep(CheckResult.of(unit[0], Status.NOT_RUN, reason))
            continue
        here = target.checks([check.id for check in unit], suite)
        for result in judge_unit(target.subject(backend), here):
            keep(result)


class _Pool:
    """Workers that take unit after unit."""

    def __init__(self, target: Target, queue: list[list[Check]], jobs: int, keep: Observer) -> None:
        self._target = target
        self._queue = queue
        self._jobs = max(1, min(jobs, len(queue)))
        self._keep = keep
        self._workers: list[_Worker] = []
        self._lost_with = ""  # id of the check with which a worker lost the device, the latest
        self._unusable = 0  # fresh workers in a row that can't use it

    def run(self) -> None:
        with TemporaryDirectory(prefix="ml4-conformance-") as folder:
            self._folder = Path(folder)
            try:
                while self._queue or self._workers:
                    self._step()
            finally:
                for worker in self._workers:
                    worker.process.end()
                for worker in self._workers:
                    worker.process.kill()

    def _step(self) -> None:
        while self._queue and len(self._workers) < self._jobs:
            self._start()
        soonest = min(worker.deadline for worker in self._workers) - time.monotonic()
        handles = {handle: worker for worker in self._workers for handle in worker.process.handles}
        ready = wait(list(handles), timeout=max(0.0, soonest))
        for worker in {id(handles[handle]): handles[handle] for handle in ready}.values():
            self._listen(worker)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if now >= worker.deadline]:
            self._lost(worker, late=True)

    def _start(self) -> None:
        log = self._folder / f"{time.monotonic_ns()}.txt"
        threads = max(1, cores() // self._jobs)
        process = Process(self._target, log, threads, doubted=bool(self._lost_with))
        unit, deadline = self._queue.pop(0), time.monotonic() + START_S
        self._workers.append(_Worker(process, unit, deadline, self._target.limit))

    def _listen(self, worker: _Worker) -> None:
        """Takes all that a worker has said; notes its death, if that is what it was."""
        for word, result in worker.process.received():
            if word == UNUSABLE:
                self._unused(worker, why=result)
                return
            if word in (RESULT, BROKEN):
                worker.last = result
                worker.at = min(worker.at + 1, len(worker.unit))
                self._keep(result)
            if word == BROKEN:
                self._replace(worker)
                return
            if word == DONE:
                self._next(worker)
                return
            worker.deadline = time.monotonic() + worker.limit + GRACE_S
            if word == READY:
                worker.ready = True
                if worker.process.doubted:
                    self._unusable = 0
                worker.process.send([check.id for check in worker.unit])
        if worker.process.dead:
            self._lost(worker, late=False)

    def _next(self, worker: _Worker) -> None:
        """Gives it the next unit; ends it where its unit or the next is to be isolated."""
        last = worker.unit[0].isolated or not self._queue or self._queue[0][0].isolated
        if last:
            self._end(worker)
            return
        worker.begin(self._queue.pop(0))
        worker.process.send([check.id for check in worker.unit])

    def _replace(self, worker: _Worker) -> None:
        """A worker has lost the device with its last result: a fresh one goes on in its place."""
        assert worker.last is not None
        self._lost_with = worker.last.id
        self._end(worker)
        if rest := worker.unit[worker.at :]:
            self._queue.insert(0, rest)

    def _unused(self, worker: _Worker, why: str) -> None:
        """A fresh worker can't use the device: another one tries, or nothing is left to try."""
        self._end(worker)
        self._queue.insert(0, worker.unit)
        self._unusable += 1
        if self._unusable < TRIES:
            return
        name = self._target.device.torch_device
        reason = (
            f"the device {name!r} is dead: after {self._lost_with} had lost it, {TRIES} fresh "
            f"processes in a row could not compute there, the last one because: {why}"
        )
        left, self._queue[:] = [check for unit in self._queue for check in unit], []
        for check in left:
            self._keep(CheckResult.of(check, Status.ERROR, reason, raised=DEVICE_LOST))

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.process.kill()

    def _lost(self, worker: _Worker, *, late: bool) -> None:
        """A worker is late or dead: that is the verdict on what it was at."""
        self._workers.remove(worker)
        code = worker.process.kill()
        words = last_words(worker.process.log)
        tail = f"; its last output: {words}" if words else ""
        limit = worker.limit if worker.ready else START_S
        what = f"did not end within {limit:g} s" if late else f"killed its process: {died(code)}"
        raised = "TimeoutError" if late else "ProcessDied"
        if not worker.ready:
            reason = f"no worker can be started: loading the plugin {what}{tail}"
            for check in worker.unit:
                self._keep(CheckResult.of(check, Status.ERROR, reason, raised=raised))
            return
        if worker.at == len(worker.unit):
            assert worker.last is not None
            self._keep(spoilt(worker.last, f"closing the session {what}{tail}", raised))
            return
        check = worker.unit[worker.at]
        seconds = limit if late else time.monotonic() - worker.since
        self._keep(
            CheckResult.of(check, Status.FAIL, f"{what}{tail}", seconds=seconds, raised=raised)
        )
        if rest := worker.unit[worker.at + 1 :]:
            self._queue.insert(0, rest)


class _Worker:
    """What the pool knows of one process.

    Attributes:
        unit: what it was given; ``at`` counts the results that came, ``last`` is the latest.
        deadline: monotonic time by which it must have said something.
        since: monotonic time of what it is at.
    """

    def __init__(
        self,
        process: Process,
        unit: list[Check],
        deadline: float,
        limit_of: Callable[[Check], float],
    ) -> None:
        self.process = process
        self.ready = False
        self._limit_of = limit_of
        self.begin(unit)
        self.deadline = deadline

    def begin(self, unit: list[Check]) -> None:
        self.unit = unit
        self.at = 0
        self.last: CheckResult | None = None
        self.since = time.monotonic()
        self.deadline = self.since + self.limit + GRACE_S

    @property
    def limit(self) -> float:
        """Seconds that what it is at may take."""
        if self.at == len(self.unit):
            return CLOSING_S
        return self._limit_of(self.unit[self.at])
