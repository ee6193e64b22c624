"""The router: which experts, in which order, with which weights."""

from __future__ import annotations

import torch

from ml4core_conformance import compare
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.evaluation import Evaluation, result
from ml4core_conformance.op_checks import op_check, variants
from ml4core_conformance.oracle.expected import Float, Selected
from ml4core_conformance.selection import selected
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import tolerance


def checks() -> list[Check]:
    return [
        op_check("ops.router", cases, _router, _router.__doc__ or "")
        for _, _, cases in variants(("router",))
    ]


def _router(subject: Subject, evaluation: Evaluation) -> bool:
    """The experts are those of the largest logits, in descending order, ties to the lowest id, with
    softmax weights, renormalised only if asked; a row with NaN has ids of experts and no weight. A
    failure means that tokens go to the wrong experts, or with the wrong share.
    """
    ids, weights = result(evaluation, "ids"), result(evaluation, "weights")
    want_ids, want = (evaluation.expected.results[name] for name in ("ids", "weights"))
    assert isinstance(want_ids, Selected)
    assert isinstance(want, Float)
    experts = want_ids.scores.shape[-1]
    outside = (ids < 0) | (ids >= experts)
    if outside.any():
        row, rank = (int(i) for i in outside.nonzero()[0])
        raise CheckFailed(
            f"ids: {int(ids[row, rank])} was chosen, and there are {experts} experts at "
            f"{evaluation.where}, T {row}"
        )
    judged = torch.where((want_ids.visible > 0).unsqueeze(-1), ids, want_ids.value)
    usable = Selected(
        want_ids.value,
        torch.nan_to_num(want_ids.scores),
        torch.full_like(want_ids.visible, experts),
        want_ids.margin,
        want_ids.axes,
        want_ids.ordered,
    )
    selected("ids", judged, usable, evaluation.where)
    compare.anomalies("weights", weights, want, evaluation.where)
    case = evaluation.case
    bound = tolerance(case.op, case.variant, want.dtype)
    subject.measure(compare.elements("weights", weights, want, bound, evaluation.where))
    return True
