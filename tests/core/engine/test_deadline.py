"""A step that never ends stops the engine, and whoever called it goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ml4core.api import FaultError, Segment, StepShape
from ml4core.engine import deadline
from ml4core.engine.args import EngineArgs
from ml4core.engine.deadline import FIRST, TimedSteps
from ml4core.engine.image_inputs import ImageRows, PlacedImage
from ml4core.engine.llm import open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.steps import StepInput
from ml4core.models.seeded import make_seeded
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LIMIT_S = 0.2
"""Of a step that is meant to be late; others get minutes."""
LONG_S = 300.0


class Stalling:
    """A runner of which one call does not end before ``released``.

    Attributes:
        at: the number of the launch, or of the result, that stalls.
        polls: whether it looks again and again, or sleeps.
    """

    def __init__(self, runner: Any, call: str, at: int, polls: bool) -> None:
        self.runner = runner
        self.call, self.at, self.polls = call, at, polls
        self.released = threading.Event()
        self.steps = 0

    def launch(self, step: Any) -> Any:
        self.steps += 1
        if self.call == "launch":
            self.pass_by(self.steps)
        return self.runner.launch(step)

    def pass_by(self, number: int) -> None:
        if number != self.at:
            return
        if not self.polls:
            self.released.wait()
        while not self.released.is_set():
            time.sleep(0.001)


class StalledResult(Stalling):
    """Handles are the honest ones, with a result that stalls."""

    def launch(self, step: Any) -> Any:
        handle, number = super().launch(step), self.steps
        result = handle.result

        def stalled() -> Any:
            self.pass_by(number)
            return result()

        handle.result = stalled
        return handle


class Stalls:
    """Wraps runners in ones that stall; ``made`` holds each, and the timed steps around it."""

    def __init__(self) -> None:
        self.made: list[tuple[Stalling, TimedSteps]] = []

    def __call__(self, call: str, at: int, polls: bool) -> Callable[[Any], TimedSteps]:
        def wrap(runner: Any) -> TimedSteps:
            kind = StalledResult if call == "result" else Stalling
            slow = kind(runner, call, at, polls)
            steps = TimedSteps(slow, LONG_S)  # a busy machine must not make honest steps late
            self.made.append((slow, steps))
            return steps

        return wrap


@pytest.fixture
def stalls() -> Iterator[Stalls]:
    found = Stalls()
    yield found
    for slow, steps in found.made:
        slow.released.set()
        assert steps.close(), "its thread ends once the call does"


@pytest.mark.parametrize("overlap", [False, True])
def test_in_time_nothing_changes(make_rig: Any, expect: Any, overlap: bool) -> None:
    steps: list[TimedSteps] = []

    def wrap(runner: Any) -> TimedSteps:
        steps.append(TimedSteps(runner, LONG_S))
        return steps[0]

    rig = make_rig(overlap=overlap, wrap=wrap)
    for name in "ab":
        rig.core.add_request(name, [7, 8, 9, len(name)], GREEDY)
    rig.run()
    for name in "ab":
        assert rig.tokens[name, 0] == expect([7, 8, 9, len(name)], GREEDY)
    rig.assert_empty()
    assert steps[0].close()
    assert steps[0].close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.parametrize("call", ["launch", "result"])
def test_a_step_that_never_ends_stops_the_engine(
    make_rig: Any, expect: Any, stalls: Stalls, call: str, polls: bool, overlap: bool
) -> None:
    rig = make_rig(overlap=overlap, wrap=stalls(call, 4, polls))
    slow, steps = stalls.made[0]
    for name in "ab":
        rig.core.add_request(name, [7, 8, 9, len(name)], GREEDY)
    while slow.steps < 3:
        rig.step()
    steps._seconds = LIMIT_S / FIRST  # all of its shapes are new
    for _ in range(3):
        rig.step()
        if rig.core.fault is not None:
            break
    fault = rig.core.fault
    assert fault.code == "timeout"
    assert fault.step == 4
    assert f"the {call} of a step did not end within" in fault.message
    assert Path(__file__).name in fault.message, "says no place"
    assert "--step-timeout-s" in fault.message
    for name in "ab":
        assert rig.ends[name, 0] == "error"
        got = rig.tokens[name, 0]
        assert len(got) <= 3
        assert got == expect([7, 8, 9, len(name)], GREEDY)[: len(got)]
    launched = slow.steps
    for refused in (rig.core.step, lambda: rig.core.add_request("c", [1], GREEDY)):
        with pytest.raises(FaultError, match="did not end within"):
            refused()
    assert slow.steps == launched
    rig.assert_empty()
    assert not steps.close(), "the call is still inside"
    slow.released.set()
    steps._worker._thread.join()
    assert steps.close()
    assert rig.core.fault is fault


class Waits:
    """Steps that end at once; ``limits`` are those of the worker's calls, over a step's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits: list[float] = []
        self.steps = TimedSteps(self, 3.0)  # type: ignore[arg-type]
        monkeypatch.setattr(self.steps._worker, "call", self.call)

    def call(self, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        self.limits.append(seconds / 3.0)
        return function(*args)

    def launch(self, step: Any) -> Any:
        return self

    def result(self) -> None: ...


def step_of(decodes: int, *images: tuple[int, int]) -> Any:
    """``images``: (side in pixels, rows in the step)."""
    none = Segment(0, 0, 0)
    shape = StepShape(Segment(decodes, decodes, 1), none, none, (), decodes)
    rows = [
        ImageRows(PlacedImage(np.zeros((3, side, side), np.float32), places, b""), places, 0)
        for side, count in images
        for places in (np.arange(count),)
    ]
    return StepInput(SimpleNamespace(shape=shape), [], [], images=rows)  # type: ignore[arg-type]


def test_a_new_shape_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "MAX_PROGRAMS", 2)
    waits = Waits(monkeypatch)
    for decodes in (1, 1, 2, 1, 3, 2, 3):
        waits.steps.launch(step_of(decodes)).result()
    assert waits.limits[1::2] == [FIRST, 1, FIRST, 1, FIRST, FIRST, 1], "of results"


def test_so_may_what_a_launch_finds_left_of_the_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = Waits(monkeypatch)
    for decodes in (1, 2, 1, 1):
        waits.steps.launch(step_of(decodes))
    assert waits.limits == [FIRST, FIRST, FIRST, 1]


def test_images_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    plain, small, large, part = (), ((8, 4),), ((16, 4),), ((16, 1),)
    for images in (plain, plain, small, small, large, large, part, part):
        waits.steps.launch(step_of(1, *images)).result()
    assert waits.limits[1::2] == [FIRST, 1] * 4


def test_errors_are_the_callers(make_rig: Any) -> None:
    rig = make_rig(wrap=lambda runner: TimedSteps(runner, LONG_S))
    rig.runner.fail_at, rig.runner.error = 2, ValueError("odd")
    rig.core.add_request("a", [1, 2], GREEDY)
    for _ in range(3):
        if rig.core.fault is None:
            rig.step()
    assert rig.core.fault.code == "exception"
    assert rig.core.cause is rig.runner.error
    assert "conftest.py" in rig.core.fault.message


class Thing:
    pass


def test_nothing_of_a_call_is_kept() -> None:
    worker = deadline._Worker(deadline.torch.device("cpu"))
    thing = Thing()
    seen = weakref.ref(thing)
    assert worker.call(LONG_S, lambda one: type(one), thing) is Thing
    del thing
    worker.call(LONG_S, int)  # the thread has come round
    assert seen() is None
    assert worker.close(LONG_S)


def test_a_thread_ends_with_its_owner() -> None:
    worker = deadline._Worker(deadline.torch.device("cpu"))
    thread = worker.call(LONG_S, threading.current_thread)
    assert thread.daemon
    del worker
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_an_interruption_waits_for_the_call() -> None:
    worker = deadline._Worker(deadline.torch.device("cpu"))
    done: list[bool] = []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        worker.call(LONG_S, work)
    assert done == [True]
    assert worker.call(LONG_S, int) == 0
    assert worker.close(LONG_S)


def test_the_flag_sets_it(tmp_path: Path) -> None:
    folder, choice = make_seeded(tmp_path / "model", "micro"), select("cpu")
    before, threads = set(threading.enumerate()), []
    for seconds in (0, 120.0):
        args = EngineArgs(str(folder), step_timeout_s=seconds, max_model_len=64)
        engine = open_engine(args, choice=choice)
        engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=2))
        threads.append([one.name for one in threading.enumerate() if one not in before])
        engine.close()
        engine.close()
    assert threads == [[], ["ml4core-steps"]]
    assert not set(threading.enumerate()) - before
