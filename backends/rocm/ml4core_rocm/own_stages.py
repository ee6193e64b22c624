"""Our kernels as providers of the stages ``select`` and ``sparse_mla``: one launch each for a whole
step, where core's composition has one for each kind of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ml4core.api import Accepted, Candidate, LayerKV, LayerSpec, Refusal, Rejected, Selection
from ml4core.api import StepPlan as Plan
from ml4core_rocm.devices import release
from ml4core_rocm.providers import OURS

if TYPE_CHECKING:  # told what it can do, the backend is listed without torch
    from torch import Tensor

OPS: Mapping[str, tuple[str, ...]] = {
    "select": ("indexer_logits", "topk", "to_slots"),
    "sparse_mla": ("sparse_mla",),
}
"""Stage -> the ops that its kernels are, which the session has to have."""


def own_candidate(stage: str, layer: LayerSpec, ops: Mapping[str, Callable[..., Any]]) -> Candidate:
    """Ours for a stage of ``OPS``; ``ops`` are the session's own."""
    found = []
    if lacking := [name for name in OPS[stage] if name not in ops]:
        reason = f"{', '.join(lacking)} are no kernels of ours here"
        found.append(Refusal("rocm", f"stage:{stage}", reason))
    if stage == "sparse_mla" and layer.topk_source is None:
        reason = "a layer that attends to every key chooses none; that is the op window_mla"
        found.append(Refusal("rocm", "stage:sparse_mla", reason))
    if stage == "select" and layer.indexer is None:
        found.append(Refusal("rocm", "stage:select", "the layer owns no indexer"))
    if found:
        return Rejected(OURS, tuple(found))
    call = _select(layer) if stage == "select" else _attend(layer, ops["sparse_mla"])
    return Accepted(OURS, call, release())


def _select(layer: LayerSpec) -> Callable[..., Selection]:
    from ml4core_rocm.kernels.indexer_logits import scores
    from ml4core_triton.kernels.topk import choose
    from ml4core_triton.select_stage import select_stage

    return select_stage(layer, partial(scores, fill=False), choose)


def _attend(layer: LayerSpec, op: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    scale = layer.softmax_scale

    def call(
        plan: Plan, kv: LayerKV, q: Tensor, selection: Selection | None
    ) -> tuple[Tensor, Tensor]:
        if selection is None:
            raise ValueError("the layer chooses its keys, and was given no selection")
        out, lse = op(q, kv.latent, selection.slots, selection.lens, scale)
        return out, lse

    return call
