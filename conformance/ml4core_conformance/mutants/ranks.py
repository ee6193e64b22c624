"""Mutants of what a rank has and adds up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ml4core.compose.single_rank import SingleRank
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import Changed, Op, Ops


def mutants() -> list[Mutant]:
    rows: Sequence[tuple[str, str, dict[str, Callable[[Op], Op]], tuple[str, ...]]] = (
        (
            "sum-forgotten",
            "What ranks have computed goes into the residual without their sum.",
            {"all_reduce_rms_norm": _alone},
            ("parallel.logits[tp]",),
        ),
        (
            "first-expert-forgotten",
            "Each rank takes its experts for the first ones.",
            {"moe_experts": _from_zero},
            ("parallel.logits[ep]",),
        ),
    )
    return [Mutant(name, doc, Changed(Ops(**ops)), dies) for name, doc, ops, dies in rows]


def _alone(honest: Op) -> Op:
    def call(x: Tensor, residual: Tensor, weight: Any, eps: float, collectives: Any) -> Any:
        return honest(x, residual, weight, eps, SingleRank())

    return call


def _from_zero(honest: Op) -> Op:
    def call(
        x: Tensor, w13: Any, w2: Any, weights: Tensor, ids: Tensor, first_expert: Any = None
    ) -> Any:
        return honest(x, w13, w2, weights, ids)

    return call
