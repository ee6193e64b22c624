"""Runs an op on a case, poisoned and watched, beside the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ml4core_conformance.oracle.expected import Expected

if TYPE_CHECKING:
    from ml4core_conformance.case import Arguments, OpCase
    from ml4core_conformance.subject import Subject


@dataclass(frozen=True)
class Evaluation:
    """One case of one seed, judged by several checks. All tensors are on the CPU.

    Attributes:
        before: the arguments as they were drawn; caches as ``Pages``.
        expected: what the oracle says.
        results: what the backend returned, by the names of the contract's returns. Fresh
            allocations were filled with NaN (bytes of 0xFF) where the device allows that.
        again: a second call on the same inputs, after other memory was poisoned.
        after: the arguments as they are after the calls.
        problems: what was wrong with the form of the results: dtype, shape, strides, device, or an
            alias of an argument.
    """

    case: OpCase
    seed: int
    before: Arguments
    expected: Expected
    results: dict[str, Any]
    again: dict[str, Any]
    after: Arguments
    problems: tuple[str, ...] = ()


def evaluate(subject: Subject, case: OpCase, seed: int) -> Evaluation:
    """Calls the subject's op. Whatever it raises is raised."""
    raise NotImplementedError
