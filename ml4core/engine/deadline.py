"""Steps with a time limit: what runs them may never answer, and the engine has to go on saying so.

A call is made in a thread of its own, so that whoever asked can give it up. It can't be ended: the
thread, and what the call holds, stay until it returns or the process ends. A call that blocks
without letting go of the interpreter's lock blocks everything; only another process could tell.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch

from ml4core.api import Fault, FaultError
from ml4core.engine.programs import MAX_PROGRAMS
from ml4core.engine.steps import StepHandle, StepInput, StepResult, StepRunner
from ml4core.engine.transfers import has_streams

T = TypeVar("T")

FIRST = 10
"""How many times the limit a step of a shape gets that has not run lately: it may compile."""
GRACE_S = 5.0
"""Seconds for which one who was interrupted, or who closes, waits for a call that is running."""
_FRAMES = 3


class TimedSteps:
    """Steps of which each launch, and each wait for a result, ends within ``seconds``.

    One that doesn't is a fault with code ``timeout``, and it is the last: no other is run.
    """

    def __init__(
        self, steps: StepRunner, seconds: float, device: torch.device | str = "cpu"
    ) -> None:
        self._steps = steps
        self._seconds = seconds
        self._worker = _Worker(torch.device(device))
        self._seen: dict[Hashable, None] = {}
        self._times = 1  # the limit, for the newest step
        self._count = 0
        self._fault: Fault | None = None

    def launch(self, step: StepInput) -> StepHandle:
        before, self._times = self._times, self._times_of(step)
        seconds = self._seconds * self._times
        self._count += 1
        if isinstance(step.before, _TimedStep):
            step = replace(step, before=step.before.inner)
        # What is left of the step before, its draws and drafts, is queued first, and may compile.
        most = self._seconds * max(before, self._times)
        handle = self.call(most, "launch", self._count, self._steps.launch, step)
        return _TimedStep(handle, self, seconds, self._count)

    def call(
        self, seconds: float, what: str, number: int, function: Callable[..., T], *args: Any
    ) -> T:
        """What the function returns or raises, if it does in time. Else ``FaultError``, as for all
        calls that follow.
        """
        if self._fault is not None:
            raise FaultError(self._fault)
        try:
            return self._worker.call(seconds, function, *args)
        except _GivenUp as given_up:
            self._fault = given_up.fault
            raise FaultError(self._fault) from None
        except _Late as late:
            self._fault = Fault(
                "timeout",
                f"the {what} of a step did not end within {seconds:g} s, and was given up; its "
                f"thread is {late}; --step-timeout-s sets the limit",
                number,
            )
            raise FaultError(self._fault) from None

    def give_up(self, fault: Fault) -> None:
        """Ends the wait for a call that runs, if one does, with this fault: it waits for what has
        gone. Any thread may ask for it.
        """
        self._worker.give_up(fault)

    def close(self, seconds: float | None = None) -> bool:
        """Ends the thread; False if a call is still inside, to which its things must be left.
        ``seconds``: how long it is waited for; None: not at all after a fault.
        """
        if seconds is None:
            seconds = 0.0 if self._fault else GRACE_S
        return self._worker.close(seconds)

    def _times_of(self, step: StepInput) -> int:
        """How many times the limit a step gets, whose programs are then those that ran last. Images
        have programs by their size, and so have the rows that take them.
        """
        sizes = tuple((one.image.pixels.shape, len(one.rows)) for one in step.images)
        key = step.plan.shape, sizes
        known = key in self._seen
        if known:
            del self._seen[key]
        elif len(self._seen) >= MAX_PROGRAMS:  # as many as are kept compiled
            del self._seen[next(iter(self._seen))]
        self._seen[key] = None
        return 1 if known else FIRST


class _TimedStep:
    def __init__(self, inner: StepHandle, steps: TimedSteps, seconds: float, number: int) -> None:
        self.inner = inner
        self._steps = steps
        self._seconds = seconds
        self._number = number

    def result(self) -> StepResult:
        return self._steps.call(self._seconds, "result", self._number, self.inner.result)


class _Late(Exception):
    """A call did not end in time; the text says where it is."""


class _GivenUp(Exception):
    """A call is waited for no more."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault


class _Worker:
    """A thread that makes one call after the other. It ends with this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        self._waiting: SimpleQueue[tuple[Any, BaseException | None]] | None = None

    def call(self, seconds: float, function: Callable[..., T], *args: Any) -> T:
        """What the function returns or raises. ``_Late`` after ``seconds``.

        If the caller is interrupted, the call gets a moment to end: what comes next would meet it.
        """
        thread = self._thread or self._start()
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        call = _Call(function, args, answer)
        self._waiting = answer
        self._calls.put(call)
        try:
            value, error = answer.get(timeout=seconds)
        except Empty:
            raise _Late(_place(thread)) from None
        except BaseException:
            if not call.ended:
                with suppress(Empty):
                    answer.get(timeout=GRACE_S)
            raise
        finally:
            self._waiting = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame
        return cast(T, value)

    def give_up(self, fault: Fault) -> None:
        if (waiting := self._waiting) is not None:
            waiting.put((None, _GivenUp(fault)))

    def close(self, seconds: float) -> bool:
        """Whether the thread has ended, ``seconds`` after it was told to."""
        if self._thread is None:
            return True
        self._end()
        self._thread.join(seconds)
        ended = not self._thread.is_alive()
        if ended:
            self._thread = None
        return ended

    def _start(self) -> threading.Thread:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._calls.put, None)
        self._end.atexit = False
        # A daemon: a process must be able to exit while a call never ends.
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, self._device), name="ml4core-steps", daemon=True
        )
        self._thread.start()
        return self._thread


class _Call:
    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], answer: SimpleQueue[Any]
    ) -> None:
        self._function = function
        self._args = args
        self._answer = answer
        self.ended = False

    def make(self) -> None:
        value, error = None, None
        try:
            value = self._function(*self._args)
        except BaseException as raised:  # the caller's, whatever it is
            error = raised
        self.ended = True
        self._answer.put((value, error))


def _serve(calls: SimpleQueue[_Call | None], device: torch.device) -> None:
    if device.index is not None and has_streams(device):
        torch.accelerator.set_device_index(device.index)  # a thread has a device of its own
    while (call := calls.get()) is not None:
        call.make()
        del call  # else its tensors live until the next one


def _place(thread: threading.Thread) -> str:
    """Where a thread is, from within outwards."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "gone"
    stack = traceback.extract_stack(frame)[-_FRAMES:]
    return "at " + ", called at ".join(f"{f.filename}:{f.lineno}" for f in reversed(stack))
