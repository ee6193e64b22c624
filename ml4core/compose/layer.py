"""One decoder layer as a composition of its two halves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ml4core.api import LayerKV, Selection, StepPlan
from ml4core.compose.attention import Children, Weights
from ml4core.compose.context import StageContext


def decoder_layer(
    ctx: StageContext, children: Children
) -> Callable[..., tuple[Tensor, Tensor | None, Selection | None]]:
    def call(
        w: Weights,
        plan: StepPlan,
        kv: LayerKV,
        residual: Tensor,
        hidden: Tensor | None,
        selection: Selection | None,
        next_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Selection | None]:
        residual, hidden, selection = children["attention"](
            w, plan, kv, residual, hidden, selection
        )
        residual, hidden = children["ffn"](w, residual, hidden, next_norm)
        return residual, hidden, selection

    return call
