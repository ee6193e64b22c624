"""What went wrong on which rank, and one error out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ml4core import registry
from ml4core.api import Fault, FaultError, Refusal, Refused
from ml4core.engine.errors import ArgumentsError, RequestError
from ml4core.engine.fault_codes import fault_of
from ml4core.models.errors import CheckpointError, shown

LOST = "rank"
"""Code of the fault of a rank whose process has ended, or that is out of step."""


@dataclass(frozen=True)
class Failure:
    """The end of a rank.

    Attributes:
        code, text: of the fault that it is.
        at: seconds of the machine's monotonic clock; 0 for a process that ended without a word,
            which is the cause of whatever else there is.
        kind: of the error, made of ``arguments``, or of the text: it is a class of its own only
            where that means something to whoever starts an engine.
    """

    rank: int
    code: str
    text: str
    at: float = 0.0
    kind: Callable[..., Exception] = RuntimeError
    arguments: tuple[Any, ...] = ()

    @property
    def said(self) -> tuple[Any, ...]:
        """Of what the error is made."""
        return self.arguments or (self.text,)


class RankLostError(Exception):
    """A rank has failed; ``Failures`` know why."""


def failure_of(error: BaseException, rank: int, at: float, step: int = 0) -> Failure:
    """An error as it goes from process to process."""
    fault = error.fault if isinstance(error, FaultError) else fault_of(error, step)
    kind: Callable[..., Exception] = RuntimeError
    arguments: tuple[Any, ...] = ()
    if isinstance(error, Refused):
        kind, arguments = Refused, (error.refusals, error.what)
    elif isinstance(error, ArgumentsError):
        kind, arguments = ArgumentsError, (error.problems,)
    elif isinstance(error, RequestError):
        value = error.value if isinstance(error.value, str) else shown(error.value)
        kind, arguments = RequestError, (error.field, value, error.remedy)
    elif isinstance(error, CheckpointError):
        kind, arguments = CheckpointError, (str(error),)
    elif registry.lacks_memory(error):
        kind, arguments = MemoryError, (str(error),)
    return Failure(rank, fault.code, fault.message, at, kind, arguments)


def one_fault(failures: Iterable[Failure], size: int, step: int) -> Fault:
    """The fault that they are: that of the rank that was first; the others are named."""
    first, *others = _in_order(failures)
    text = f"{_named([first], size)}: {first.text}"
    if others:
        text += f"; then {_named(others, size)} failed, too"
    return Fault(first.code, text, step, first.rank)


def one_error(failures: Iterable[Failure], size: int) -> Exception:
    """The error of the rank that was first, with the names of all that have the same; refusals of
    all ranks in one.
    """
    failures = _in_order(failures)
    first = failures[0]
    if first.kind is Refused:
        refused = [one for one in failures if one.kind is Refused]
        return Refused(_joined(refused, size), first.arguments[1])
    if first.kind in (ArgumentsError, RequestError):  # of the flags, which all ranks have
        return first.kind(*first.said)
    alike = [one for one in failures if (one.kind, one.said) == (first.kind, first.said)]
    return first.kind(f"{_named(alike, size)}: {first.said[0]}")


def _in_order(failures: Iterable[Failure]) -> list[Failure]:
    return sorted(failures, key=lambda one: (one.at, one.rank))


def _named(failures: Sequence[Failure], size: int) -> str:
    ranks = sorted(one.rank for one in failures)
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {size}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} of {size}"


def _joined(refused: Sequence[Failure], size: int) -> list[Refusal]:
    holders: dict[Refusal, list[Failure]] = {}
    for one in refused:
        for refusal in one.arguments[0]:
            holders.setdefault(refusal, []).append(one)
    return [
        refusal
        if len(ranks) == size
        else replace(refusal, reason=f"{refusal.reason} (on {_named(ranks, size)})")
        for refusal, ranks in holders.items()
    ]
