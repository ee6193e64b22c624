"""Whether a row's bits depend on who shares its batch."""

from __future__ import annotations

from torch import Tensor

from ml4core.api import OPS
from ml4core_conformance import compare
from ml4core_conformance.case import Arguments
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.evaluation import Evaluation, caller_of, result
from ml4core_conformance.op_checks import op_check, variants
from ml4core_conformance.placement import tensors
from ml4core_conformance.subject import Subject

_BY_ROW = (
    "rms_norm",
    "layer_norm",
    "all_reduce_rms_norm",
    "rope",
    "ssmax",
    "gemm",
    "head_gemm",
    "silu_mul",
    "sparse_mla",
    "router",
    "moe_experts",
)
"""Ops whose rows are the first axis of arguments and results."""


def checks() -> list[Check]:
    needs = frozenset({"feature:batch_invariant"})
    doc = _batch.__doc__ or ""
    return [
        op_check("ops.batch", cases, _batch, doc, requires=needs)
        for _, _, cases in variants(_BY_ROW)
    ]


def _batch(subject: Subject, evaluation: Evaluation) -> bool:
    """A row has the same bits alone, in half of the batch and in all of it, as
    ``feature:batch_invariant`` says. A failure means that a request's text depends on its
    neighbours: a split or a tile that follows the number of rows.
    """
    case, before = evaluation.case, evaluation.before
    rows = _rows(case.op, before)
    if rows < 2 or case.options.get("ranks"):  # other ranks hold as many rows
        return False
    result(evaluation, OPS[case.op].returns[0].name)
    whole = dict(tensors(evaluation.again))
    caller = caller_of(subject, case)
    for chosen in (slice(0, 1), slice(rows - 1, rows), slice(0, (rows + 1) // 2)):
        found = dict(tensors(caller.results(_cut(case.op, before, chosen))))
        for name, part in found.items():
            want = whole[name][chosen]
            wrong = compare.different(part, want) if part.shape == want.shape else None
            if wrong is None or wrong.any():
                where = f"rows {chosen.start}..{chosen.stop - 1} of {rows}, {evaluation.where}"
                count = "their shape" if wrong is None else f"{int(wrong.sum())} elements"
                raise CheckFailed(f"{name}: {count} of {where} differ from those of the batch")
    return True


def _rows(op: str, arguments: Arguments) -> int:
    first = OPS[op].args[0].name
    return int(arguments[first].shape[0])


def _cut(op: str, arguments: Arguments, chosen: slice) -> Arguments:
    """The arguments of some rows."""
    by_row = {arg.name for arg in OPS[op].args if arg.axes and arg.axes[0] in ("T", "...")}
    return {
        name: value[chosen] if name in by_row and isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
