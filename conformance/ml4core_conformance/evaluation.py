"""Runs an op on a case, poisoned and watched, beside the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ml4core.api import OPS
from ml4core.compose.contract import CheckedOp
from ml4core_conformance.check import CheckFailed, is_slow
from ml4core_conformance.form import problems_of_form
from ml4core_conformance.oracle import oracle
from ml4core_conformance.oracle.expected import Expected
from ml4core_conformance.placement import Placed, on_cpu, place, tensors, to_bytes
from ml4core_conformance.poison import leave_poison, poisoned_allocations

if TYPE_CHECKING:
    from ml4core_conformance.case import Arguments, OpCase
    from ml4core_conformance.subject import Subject

Results = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """One case of one seed, judged by several checks. All tensors are on the CPU.

    Attributes:
        before: the arguments as they were drawn; caches as ``Pages``.
        expected: what the oracle says.
        results: what the backend returned, by the names of the contract's returns. Fresh
            allocations were filled with NaN (bytes of 0xFF) where the device allows that.
        again: the results of a second call on another copy of the inputs, after other memory was
            poisoned; torch's own deterministic mode is off for it.
        after: the first call's arguments as they are after both calls.
        after_again: the second call's arguments as they are after it.
        problems: what was wrong with the form of the results: count, type, dtype, shape, strides,
            device, or memory shared with an argument or a result of the first call.
        changes: arguments outside of ``writes``, and results of the first call, that a call
            changed.
        trespasses: writes between the pages of strided caches.
    """

    case: OpCase
    seed: int
    before: Arguments
    expected: Expected
    results: Results
    again: Results
    after: Arguments
    after_again: Arguments
    problems: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    trespasses: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"case {self.case.id} seed {self.seed}"


class Caller:
    """Calls one op of a subject with arguments by name, each time on a copy of them.

    Attributes:
        call: the backend's own callable, without core's check of its results.
    """

    def __init__(self, subject: Subject, op: str, needs: frozenset[str] = frozenset()) -> None:
        """``needs`` are the capability words that the session is opened for."""
        self._session, ops = subject.session_for(needs)
        found = ops[op]
        self.call: Callable[..., Any] = found.call if isinstance(found, CheckedOp) else found
        self._spec = OPS[op]
        self._device = subject.torch_device

    def place(self, arguments: Arguments) -> Placed:
        return place(self._session, arguments, self._device)

    def __call__(self, placed: Placed) -> tuple[Any, Results]:
        """What the op returned, and the same by the names of the contract's returns as far as it
        has that form. On the device.
        """
        given = [placed.given.get(arg.name) for arg in self._spec.args]
        while given and given[-1] is None:  # optional ones that were left out
            given.pop()
        returned = self.call(*given)
        values = (returned,) if len(self._spec.returns) == 1 else returned
        if not isinstance(values, tuple | list):
            values = ()
        return returned, dict(zip((one.name for one in self._spec.returns), values, strict=False))

    def results(self, arguments: Arguments) -> Results:
        """The results of one call on a copy of the arguments, on the CPU."""
        return {name: on_cpu(value) for name, value in self(self.place(arguments))[1].items()}


def evaluate(subject: Subject, case: OpCase, seed: int) -> Evaluation:
    """Calls the subject's op twice. Whatever it raises is raised."""
    caller = caller_of(subject, case)
    before = case.arguments(seed, is_slow(subject.device))
    expected = oracle(case.op)(case.options, before)

    first = caller.place(before)
    with poisoned_allocations():
        returned, found = caller(first)
    results = {name: on_cpu(value) for name, value in found.items()}
    problems = list(problems_of_form(case.op, first.given, returned, expected))

    leave_poison(value for _, value in tensors(found))
    second = caller.place(before)
    _, found_again = caller(second)
    problems += _reused(found, found_again)

    writes = OPS[case.op].writes
    after, after_again = first.read(before), second.read(before)
    changes = [
        *_changed("argument", before, after, writes),
        *_changed("argument", before, after_again, writes),
        *_changed("result", results, {name: on_cpu(value) for name, value in found.items()}),
    ]
    return Evaluation(
        case,
        seed,
        before,
        expected,
        results,
        {name: on_cpu(value) for name, value in found_again.items()},
        after,
        after_again,
        tuple(dict.fromkeys(problems)),
        tuple(dict.fromkeys(changes)),
        (*first.trespasses(), *second.trespasses()),
    )


def caller_of(subject: Subject, case: OpCase) -> Caller:
    """A caller of the case's op, of a session opened for what the case needs: its layout, its dtype
    and, for a declared compute variant, that.
    """
    return Caller(subject, case.op, case.requires)


def result(evaluation: Evaluation, name: str) -> Any:
    """A result. ``CheckFailed`` if there is none of the form that the contract wants."""
    if evaluation.problems:
        listed = "; ".join(evaluation.problems)
        raise CheckFailed(f"the results can't be judged at {evaluation.where}: {listed}")
    return evaluation.results[name]


def _reused(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Results that lie in the memory of an earlier call's, which are still in use."""
    spans = {_start(value): name for name, value in tensors(first) if value.numel()}
    return [
        f"result {name!r} lies in the memory of result {spans[_start(value)]!r} of the call before,"
        " which the caller still has; results are fresh"
        for name, value in tensors(second)
        if value.numel() and _start(value) in spans
    ]


def _start(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _changed(
    kind: str, before: Mapping[str, Any], after: Mapping[str, Any], writes: tuple[str, ...] = ()
) -> list[str]:
    old = dict(tensors(before))
    found = []
    for name, new in tensors(after):
        if name.partition(".")[0] in writes and not name.endswith(".scale"):
            continue
        differ = (to_bytes(old[name]) != to_bytes(new)).flatten().nonzero()
        if len(differ):
            element = int(differ[0]) // new.element_size()
            where = [int(i) for i in torch.unravel_index(torch.tensor(element), new.shape)]
            found.append(f"{kind} {name!r} was changed, first at {where}")
    return found
