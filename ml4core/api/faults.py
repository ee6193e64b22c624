"""The sticky fault word."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Why an engine stopped. Once set it stays: no token of the failed step leaves, later steps are
    refused.

    Attributes:
        code: a short stable word, e.g. ``"nan"``, ``"timeout"``, ``"device"``, ``"contract"``,
            ``"memory"``, or ``"rank"``: another rank's process has ended.
        message: what happened, for a person.
        step: the step counter at which it was seen.
        rank: the rank that saw it first.
    """

    code: str
    message: str
    step: int
    rank: int = 0


class FaultError(RuntimeError):
    """Raised by a step that faulted, and by each step asked for afterwards."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(
            f"engine stopped by fault {fault.code!r} at step {fault.step} on rank {fault.rank}: "
            f"{fault.message}"
        )
