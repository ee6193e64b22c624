"""What holds for every op: the form of its results, what it may change, and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ml4core.api import OPS
from ml4core_conformance import compare
from ml4core_conformance.check import Check, CheckFailed, NotRun
from ml4core_conformance.evaluation import Evaluation, caller_of, result
from ml4core_conformance.op_checks import op_check, variants
from ml4core_conformance.oracle.expected import Exact, Float, Law
from ml4core_conformance.placement import on_cpu, tensors
from ml4core_conformance.poison import allocations_are_poisoned, is_poison
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import Tolerance, tolerance

_FLOAT = frozenset(
    {"rms_norm", "layer_norm", "all_reduce_rms_norm", "rope", "ssmax", "gemm", "head_gemm"}
    | {"silu_mul", "indexer_logits", "sparse_mla", "window_mla", "merge_lse", "router"}
    | {"moe_experts"}
)
"""Ops with results that are rounded."""
_EXACT = frozenset({"embed", "gather_kv", "to_slots"})
"""Ops with results of which every bit is known."""


def checks() -> list[Check]:
    found: list[Check] = []
    for op, _, cases in variants():
        made = [
            op_check("ops.signature", cases, _signature, _signature.__doc__ or ""),
            op_check("ops.purity", cases, _purity, _purity.__doc__ or ""),
        ]
        if OPS[op].returns:
            made.append(op_check("ops.written", cases, _written, _written.__doc__ or ""))
            needs = frozenset({"feature:deterministic"})
            doc = _repeat.__doc__ or ""
            made.append(op_check("ops.repeat", cases, _repeat, doc, requires=needs))
        for family, judge in _NUMBERS.items():
            if op in (_EXACT if family == "ops.exact" else _FLOAT):
                made.append(op_check(family, cases, judge, judge.__doc__ or ""))
        exact = [case for case in cases if case.options.get("exact")]
        if exact:
            made.append(op_check("bytes.rounding", exact, _rounding, _rounding.__doc__ or ""))
        found += made
    return found


def _signature(subject: Subject, evaluation: Evaluation) -> bool:
    """Results have the count, types, dtypes, shapes and device of the contract, are dense, and lie
    in fresh memory. A failure means that callers read something else than they think.
    """
    if evaluation.problems:
        raise CheckFailed(f"{'; '.join(evaluation.problems)} at {evaluation.where}")
    return True


def _purity(subject: Subject, evaluation: Evaluation) -> bool:
    """Arguments that the contract doesn't name as written stay as they are, bit for bit, and so do
    results of an earlier call. A failure means that one step spoils another.
    """
    if evaluation.changes:
        raise CheckFailed(f"{'; '.join(evaluation.changes)} at {evaluation.where}")
    return True


def _written(subject: Subject, evaluation: Evaluation) -> bool:
    """Each element of a result was written by this call: memory that was full of NaN (integers:
    the largest) before holds none after. A failure means stale or random values now and then.
    """
    if not allocations_are_poisoned(subject.torch_device):
        raise NotRun(f"torch doesn't poison allocations on {subject.torch_device}")
    for name, want in evaluation.expected.results.items():
        if want is None:
            continue
        found = part_of(result(evaluation, name.partition(".")[0]), name)
        poison = is_poison(found)
        if not isinstance(want, Law):
            poison = poison & ~is_poison(_due(want))
        if poison.any():
            first = int(poison.flatten().nonzero()[0])
            axes = () if isinstance(want, Law) else want.axes
            place = compare.place_of(first, found.shape, axes)
            raise CheckFailed(
                f"{name}: {int(poison.sum())} of {poison.numel()} elements were not written, first "
                f"at {evaluation.where}, {place}"
            )
    return True


def _repeat(subject: Subject, evaluation: Evaluation) -> bool:
    """The same inputs give the same bits from call to call, as ``feature:deterministic`` says. A
    failure means unordered atomics or memory that wasn't initialised.
    """
    caller = caller_of(subject, evaluation.case)
    once = dict(tensors(evaluation.again))
    for _ in range(2):
        more = dict(tensors(caller.results(evaluation.before)))
        for name, first in once.items():
            other = more.get(name)
            if other is None or other.shape != first.shape or other.dtype != first.dtype:
                raise CheckFailed(f"{name}: its form differs between calls at {evaluation.where}")
            wrong = compare.different(first, other)
            if wrong.any():
                at = int(wrong.flatten().nonzero()[0])
                raise CheckFailed(
                    f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ between equal "
                    f"calls, first at {evaluation.where}, {compare.place_of(at, wrong.shape, ())}"
                )
    return bool(once)


def _anomalies(subject: Subject, evaluation: Evaluation) -> bool:
    """NaN, +inf and -inf are exactly where the contract has them."""
    for name, found, want, _ in _floats(evaluation):
        compare.anomalies(name, found, want, evaluation.where)
    return _has(evaluation, Float)


def _elements(subject: Subject, evaluation: Evaluation) -> bool:
    """Each element is within what one cast to its dtype and an fp32 sum may round. A failure names
    the worst element: a wrong formula, index or mask, or accumulation in less than fp32.
    """
    for name, found, want, bound in _floats(evaluation):
        subject.measure(compare.elements(name, found, want, bound, evaluation.where))
    return _has(evaluation, Float)


def _structure(subject: Subject, evaluation: Evaluation) -> bool:
    """The relative RMS error of each slice (row, head, column) is that of one rounding. A failure
    names the slice, e.g. one head that is wrong among many that are right.
    """
    for name, found, want, bound in _floats(evaluation):
        measures = compare.structure(name, found, want, bound, evaluation.where)
        # The worst first: it is the slice that a failure names.
        for measure in sorted(measures, key=lambda one: one.ratio, reverse=True):
            subject.measure(measure)
    return _has(evaluation, Float)


def _bias(subject: Subject, evaluation: Evaluation) -> bool:
    """Errors favour no direction: gain and angle of the whole result. A failure means a scale that
    is slightly off, or rounding toward zero.
    """
    for name, found, want, bound in _floats(evaluation):
        for measure in compare.bias(name, found, want, bound, evaluation.where):
            subject.measure(measure)
    return _has(evaluation, Float)


def _exact(subject: Subject, evaluation: Evaluation) -> bool:
    """Integers, booleans and copied values are those of the oracle, bit for bit."""
    for name, want in evaluation.expected.results.items():
        if isinstance(want, Exact):
            found = part_of(result(evaluation, name.partition(".")[0]), name)
            compare.exact(name, found, want, evaluation.where)
    return _has(evaluation, Exact)


def _rounding(subject: Subject, evaluation: Evaluation) -> bool:
    """Where fp32 holds the sum exactly, the result is its nearest number, ties to even. A failure
    means truncation, another rule for ties, or an accumulator of less than fp32.
    """
    exact = evaluation.case.options["exact"]
    for name, found, want, _ in _floats(evaluation):
        if exact is not True and name not in exact:
            continue
        due = want.value.to(found.dtype)
        wrong = (found != due).flatten()
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise CheckFailed(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are not rounded to "
                f"nearest even, first at {evaluation.where}, "
                f"{compare.place_of(first, found.shape, want.axes)}: the exact sum is "
                f"{float(want.value.flatten()[first]):.9g}, found "
                f"{float(found.flatten()[first]):.9g}, wanted is {float(due.flatten()[first]):.9g}"
            )
    return _has(evaluation, Float)


_NUMBERS: Mapping[str, Callable[[Subject, Evaluation], bool]] = MappingProxyType(
    {
        "ops.anomalies": _anomalies,
        "ops.elements": _elements,
        "ops.structure": _structure,
        "ops.bias": _bias,
        "ops.exact": _exact,
    }
)


def part_of(value: Any, name: str) -> Tensor:
    """A result by its name among the expected ones: itself, or a part of a ``Weight``."""
    part = name.partition(".")[2]
    found: Tensor = on_cpu(value.parts[part] if part else value)
    return found


def _floats(evaluation: Evaluation) -> Iterator[tuple[str, Tensor, Float, Tolerance]]:
    case = evaluation.case
    for name, want in evaluation.expected.results.items():
        if isinstance(want, Float):
            bound = tolerance(case.op, case.variant, want.dtype)
            yield name, result(evaluation, name), want, bound


def _has(evaluation: Evaluation, kind: type) -> bool:
    return any(isinstance(want, kind) for want in evaluation.expected.results.values())


def _due(want: Any) -> Tensor:
    value: Tensor = want.value
    return value
