"""From the switch to the first step, and to the end. Before each move that waits for other ranks,
all ranks have agreed.

    OFF
    REQUESTED --configure: all reasons of the deployment--> CONFIGURED
    CONFIGURED --bind: reasons of the weights, agreed--> BOUND
    BOUND --connect: peers' memory is opened, agreed--> CONNECTED
    CONNECTED --load: kernels of every width, their residency, agreed--> READY
    READY --arm: reasons of the caches, agreed--> ARMED
    ARMED --a wait was given up, or the host raised--> FAULTED; there is no way back
    any --close--> CLOSED
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from ml4core.api import Fault, Refusal, Refused, StepShape
from ml4core_rocm.latency.agreement import Group, agree
from ml4core_rocm.latency.steps import Decision, StepFacts, plan


class State(Enum):
    OFF = "off"
    REQUESTED = "requested"
    CONFIGURED = "configured"
    BOUND = "bound"
    CONNECTED = "connected"
    READY = "ready"
    ARMED = "armed"
    FAULTED = "faulted"
    CLOSED = "closed"


MOVES: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.OFF: frozenset({State.CLOSED}),
        State.REQUESTED: frozenset({State.CONFIGURED, State.CLOSED}),
        State.CONFIGURED: frozenset({State.BOUND, State.CLOSED}),
        State.BOUND: frozenset({State.CONNECTED, State.CLOSED}),
        State.CONNECTED: frozenset({State.READY, State.CLOSED}),
        State.READY: frozenset({State.ARMED, State.FAULTED, State.CLOSED}),
        State.ARMED: frozenset({State.ARMED, State.FAULTED, State.CLOSED}),
        State.FAULTED: frozenset({State.CLOSED}),
        State.CLOSED: frozenset({State.CLOSED}),
    }
)
"""What may follow. Caches may be bound anew; a fault is never left."""

Reasons = Callable[[], Iterable[Refusal]]


class WrongMove(RuntimeError):
    """A call out of its turn: a mistake of the caller."""


class LatencyDecode:
    """One rank's."""

    def __init__(self, group: Group, requested: bool) -> None:
        self.state = State.REQUESTED if requested else State.OFF
        self.fault: Fault | None = None
        self._group = group
        self._release: list[Callable[[], object]] = []
        self._caches: tuple[int, ...] = ()

    def configure(self, reasons: Sequence[Refusal]) -> None:
        """Raises ``Refused`` with all of them. They depend on the deployment alone, so every rank
        has the same, and none has to be asked.
        """
        self._check(State.CONFIGURED)
        if reasons:
            raise Refused(reasons, what="the specialised decode")
        self.state = State.CONFIGURED

    def bind(self, reasons: Reasons) -> None:
        """Once weights are loaded."""
        self._agreed(State.BOUND, reasons)

    def connect(self, opened: Reasons, release: Callable[[], object]) -> None:
        """``opened`` allocates this rank's memory, trades handles and opens the peers'; a rank
        that can't says why, and still reaches the agreement. ``release`` gives the memory back.
        """
        self._check(State.CONNECTED)
        self._release.append(release)
        self._agreed(State.CONNECTED, opened)

    def load(self, loaded: Reasons) -> None:
        """``loaded`` compiles and loads the kernel of each width, and tells what is wrong with
        one.
        """
        self._agreed(State.READY, loaded)

    def arm(self, caches: Sequence[int], reasons: Reasons, capturing: bool = False) -> None:
        """``caches``: addresses of the caches that steps will be given. They can't change while a
        graph is captured, which would keep the old ones.
        """
        found = list(reasons())
        if capturing and self._caches:
            reason = "caches can't be bound anew while a graph is captured"
            found.append(Refusal("rocm", "caches", reason, "binding them before"))
        self._agreed(State.ARMED, lambda: found)
        self._caches = tuple(caches)

    def plan(
        self, shape: StepShape, window: int | None, caches: Sequence[int], graph: str = "none"
    ) -> Decision:
        """Raises ``WrongMove`` after a fault: no step follows one."""
        if self.state in (State.FAULTED, State.CLOSED):
            raise WrongMove(f"a step was planned in state {self.state.value}")
        if self.state is not State.ARMED:
            return Decision(False, f"the specialised decode is {self.state.value}")
        return plan(shape, window, StepFacts(tuple(caches) == self._caches, graph))

    def fail(self, fault: Fault) -> None:
        """The first fault stays."""
        if self.state is not State.FAULTED:
            self._check(State.FAULTED)
            self.state, self.fault = State.FAULTED, fault

    def close(self) -> None:
        """Gives the peers' memory back, once; whoever drops the owner does it, not the exit of the
        process.
        """
        self._check(State.CLOSED)
        self.state = State.CLOSED
        while self._release:
            self._release.pop()()

    def _agreed(self, to: State, reasons: Reasons) -> None:
        self._check(to)
        agree(self._group, self._told(reasons), to.value)
        self.state = to

    @staticmethod
    def _told(reasons: Reasons) -> tuple[Refusal, ...]:
        """A failure is a reason like another: the other ranks wait for this one's answer."""
        try:
            return tuple(reasons())
        except Refused as refused:
            return refused.refusals
        except Exception as error:
            return (Refusal("rocm", type(error).__name__, str(error) or "no message"),)

    def _check(self, to: State) -> None:
        if to not in MOVES[self.state]:
            raise WrongMove(f"from state {self.state.value} none leads to {to.value}")
