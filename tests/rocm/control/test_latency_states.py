"""The state machine, and which steps go the specialised way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ml4core.api import Fault, Refusal, Refused, Segment, StepShape
from ml4core_rocm.latency.agreement import One
from ml4core_rocm.latency.states import MOVES, LatencyDecode, State, WrongMove
from ml4core_rocm.latency.steps import MONO, ROWS, StepFacts, plan

NONE = Segment(0, 0, 0)
NO = (Refusal("rocm", "x", "no"),)


def shape(decode: int = 0, verify: tuple[int, int] = (0, 0), prefill: int = 0) -> StepShape:
    requests, rows = verify
    return StepShape(
        Segment(decode, decode, 1) if decode else NONE,
        Segment(requests, requests * rows, rows) if requests else NONE,
        Segment(1, prefill, prefill) if prefill else NONE,
        (("latent", 4),),
        1,
    )


def armed(group: Any = None) -> LatencyDecode:
    made = LatencyDecode(group or One(), requested=True)
    made.configure(())
    made.bind(lambda: ())
    made.connect(lambda: (), lambda: None)
    made.load(lambda: ())
    made.arm((1, 2), lambda: ())
    return made


@pytest.mark.parametrize("rows", ROWS)
def test_small_pure_decodes_go_that_way(rows: int) -> None:
    assert armed().plan(shape(decode=rows), 4, (1, 2)) == MONO


def test_one_verify_block_goes_that_way() -> None:
    assert armed().plan(shape(verify=(1, 4)), 4, (1, 2)) == MONO


@pytest.mark.parametrize(
    ("step", "window", "told"),
    [
        (shape(decode=3), 4, "3 decodes"),
        (shape(decode=8), 4, "8 decodes"),
        (shape(), 4, "0 decodes"),
        (shape(decode=1, prefill=9), 4, "9 rows of prompts"),
        (shape(decode=1, verify=(1, 4)), 4, "mixed"),
        (shape(verify=(2, 4)), 4, "2 verify blocks"),
        (shape(verify=(1, 3)), 4, "3 rows, not of 4"),
        (shape(verify=(1, 4)), None, "not of None"),
    ],
)
def test_other_steps_do_not(step: StepShape, window: int | None, told: str) -> None:
    found = plan(step, window, StepFacts())
    assert not found.mono
    assert told in found.why


def test_caches_and_graphs_decide_too() -> None:
    made, step = armed(), shape(decode=1)
    assert "caches" in made.plan(step, None, (1, 3)).why
    assert "piecewise" in made.plan(step, None, (1, 2), "piecewise").why
    assert made.plan(step, None, (1, 2), "full") == MONO


def test_off_stays_stock() -> None:
    off = LatencyDecode(One(), requested=False)
    assert off.plan(shape(decode=1), None, ()).why == "the specialised decode is off"
    with pytest.raises(WrongMove, match="from state off none leads to configured"):
        off.configure(())


def test_reasons_refuse_and_leave_the_state() -> None:
    made = LatencyDecode(One(), requested=True)
    with pytest.raises(Refused):
        made.configure(NO)
    assert made.state is State.REQUESTED
    made.configure(())
    with pytest.raises(Refused):
        made.bind(lambda: NO)
    assert made.state is State.CONFIGURED


class Counting(One):
    """Counts how often ranks were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def gather(self, value: object) -> Sequence[Any]:
        assert isinstance(value, tuple)
        self.asked.append(value[0])
        return (value,)


def test_ranks_agree_at_each_stage_even_where_one_fails() -> None:
    group = Counting()

    def fails() -> Iterable[Refusal]:
        raise OSError("hipIpcOpenMemHandle failed")

    freed: list[str] = []
    made = LatencyDecode(group, requested=True)
    made.configure(())
    assert group.asked == []  # every rank has the same reasons there
    made.bind(lambda: ())
    with pytest.raises(Refused, match="OSError: hipIpcOpenMemHandle failed"):
        made.connect(fails, lambda: freed.append("memory"))
    assert group.asked == ["bound", "connected"]
    made.close()
    made.close()
    assert freed == ["memory"]


def test_caches_are_not_bound_anew_within_a_capture() -> None:
    made = armed()
    made.arm((5, 6), lambda: ())
    assert made.plan(shape(decode=1), None, (5, 6)) == MONO
    with pytest.raises(Refused, match="while a graph is captured"):
        made.arm((7, 8), lambda: (), capturing=True)
    assert made.plan(shape(decode=1), None, (5, 6)) == MONO


def test_a_fault_is_the_end() -> None:
    made = armed()
    first = Fault("timeout", "rank 2 did not come", 7, 2)
    made.fail(first)
    made.fail(Fault("timeout", "another", 8))
    assert made.fault == first
    with pytest.raises(WrongMove, match="in state faulted"):
        made.plan(shape(decode=1), None, (1, 2))
    with pytest.raises(WrongMove):
        made.arm((1, 2), lambda: ())
    made.close()
    with pytest.raises(WrongMove, match="in state closed"):
        made.plan(shape(decode=1), None, (1, 2))


class Machine(RuleBasedStateMachine):
    """Any calls in any order: only the moves of the table happen, faults stay, memory is freed
    once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.freed = self.opened = 0
        self.made = LatencyDecode(One(), requested=True)
        self.faulted = False

    def move(self, call: Any) -> None:
        before = self.made.state
        try:
            call()
        except (WrongMove, Refused):
            assert self.made.state is before
        else:
            assert self.made.state in MOVES[before] | {before}

    @rule(bad=st.booleans())
    def configure(self, bad: bool) -> None:
        self.move(lambda: self.made.configure(NO if bad else ()))

    @rule(bad=st.booleans())
    def bind(self, bad: bool) -> None:
        self.move(lambda: self.made.bind(lambda: NO if bad else ()))

    @rule(bad=st.booleans())
    def connect(self, bad: bool) -> None:
        def release() -> None:
            self.freed += 1

        def opened() -> Iterable[Refusal]:
            self.opened += 1
            return NO if bad else ()

        self.move(lambda: self.made.connect(opened, release))

    @rule(bad=st.booleans())
    def load(self, bad: bool) -> None:
        self.move(lambda: self.made.load(lambda: NO if bad else ()))

    @rule(bad=st.booleans(), capturing=st.booleans())
    def arm(self, bad: bool, capturing: bool) -> None:
        self.move(lambda: self.made.arm((1,), lambda: NO if bad else (), capturing))

    @rule()
    def fail(self) -> None:
        self.move(lambda: self.made.fail(Fault("timeout", "x", 1)))
        self.faulted |= self.made.state is State.FAULTED

    @rule()
    def close(self) -> None:
        self.move(self.made.close)
        assert self.freed == self.opened

    @rule()
    def step(self) -> None:
        if self.made.state in (State.FAULTED, State.CLOSED):
            with pytest.raises(WrongMove):
                self.made.plan(shape(decode=1), None, (1,))
        else:
            found = self.made.plan(shape(decode=1), None, (1,))
            assert found.mono == (self.made.state is State.ARMED)

    @invariant()
    def faults_stay(self) -> None:
        assert not self.faulted or self.made.state in (State.FAULTED, State.CLOSED)


TestMachine = Machine.TestCase
