"""Quantisers, byte for byte."""

from __future__ import annotations

from ml4core.api import Weight
from ml4core_conformance import compare
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.evaluation import Evaluation, result
from ml4core_conformance.op_checks import op_check, variants
from ml4core_conformance.oracle.expected import Exact
from ml4core_conformance.subject import Subject


def checks() -> list[Check]:
    return [
        op_check("bytes.quantize", cases, _bytes, _bytes.__doc__ or "")
        for _, _, cases in variants(("quantize",))
    ]


def _bytes(subject: Subject, evaluation: Evaluation) -> bool:
    """Codes and scales are those of the format's rules, bit for bit: amax of the finite values, the
    scale's rounding, ties to even, saturation, order of nibbles. A failure means that weights which
    one backend quantised are other numbers than those of another.
    """
    weight, before = result(evaluation, "weight"), evaluation.before
    if not isinstance(weight, Weight):
        raise CheckFailed(f"the result is a {type(weight).__name__} at {evaluation.where}")
    wanted = before["format"], tuple(before["x"].shape)
    if (weight.format, tuple(weight.shape)) != wanted:
        raise CheckFailed(
            f"the result is {weight.format!r} {list(weight.shape)} at {evaluation.where}; wanted "
            f"is {wanted[0]!r} {list(wanted[1])}"
        )
    # Scales first: a wrong one makes its codes wrong, and is what a failure should name.
    parts = evaluation.expected.results.items()
    for name, want in sorted(parts, key=lambda part: part[0].endswith(".data")):
        if isinstance(want, Exact):
            compare.exact(name, weight.parts[name.partition(".")[2]], want, evaluation.where)
    return True
