"""The inputs of the checks of stages: steps of each kind on filled caches, with padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    Accepted,
    LayerSpec,
    ModelSpec,
    Selection,
    Session,
    StepPlan,
    StepShape,
    VisionShape,
)
from ml4core.compose import attention, ffn, layer
from ml4core.compose.bind import bind_global_stage
from ml4core.compose.context import Ops, StageContext
from ml4core.engine.collectives import SingleRank
from ml4core_conformance.draw import Draw
from ml4core_conformance.rigs.plans import Padding, make_plan, on_cpu
from ml4core_conformance.rigs.rig import Rig

KINDS = ("decode", "verify", "prefill", "mixed")
_JUNK = 64.0
"""What padded rows hold: finite, and large enough to show where it leaks."""

_BUILDERS: Mapping[str, Callable[..., Callable[..., Any]]] = {
    "decoder_layer": layer.decoder_layer,
    "attention": attention.attention,
    "attn_inputs": attention.attn_inputs,
    "select": attention.select,
    "sparse_mla": attention.sparse_mla,
    "attn_output": attention.attn_output,
    "ffn": ffn.ffn,
}
_CHILDREN: Mapping[str, tuple[str, ...]] = {
    "decoder_layer": ("attention", "ffn"),
    "attention": ("attn_inputs", "select", "sparse_mla", "attn_output"),
}


class Scene:
    """A step of one kind, its plan, and which rows are real.

    Contexts end in the middle of a page, at its border and beyond; one chunk crosses a border.
    """

    def __init__(self, rig: Rig, kind: str, seed: int) -> None:
        self.rig = rig
        self.kind = kind
        self.draw = Draw(seed, f"scene/{kind}")
        size, book = rig.block_size, rig.book()

        def request(context: int, rows: int) -> tuple[Any, int]:
            ids = self.draw.integers(context + rows, high=rig.spec.vocab_size).tolist()
            made = book.request(ids, size)
            made.computed = context
            return made, rows

        work, padding, window = [], Padding(), 0
        if kind in ("decode", "mixed"):
            work += [request(size + 9, 1), request(size - 1, 1)]
        if kind == "decode":
            # Few enough rows may all be too near to another choice of experts to be compared.
            work += [request(4, 1), request(9, 1), request(2, 1)]
        if kind in ("verify", "mixed"):
            window = 3
            work.append(request(size - 2, 3))
        if kind == "verify":
            work.append(request(7, 3))
        if kind in ("prefill", "mixed"):
            work += [request(0, 5), request(size - 4, 9)]
            padding = Padding(requests=3, rows=18, pages=3)
        else:
            padding = Padding(requests=len(work) + 1)
        self.plan = make_plan(work, size, verify_rows=window, padding=padding, device=rig.device)
        self.cpu: StepPlan = on_cpu(self.plan)
        self.real = self.cpu.visible > 0
        self.visible = self._visible("latent")

    @property
    def rows(self) -> int:
        return len(self.real)

    def floats(self, *shape: int) -> Tensor:
        """Nearly normal rows [T, ...] in the dtype of activations on the CPU; junk in padding."""
        values = self.draw.normal(self.rows, *shape)
        values[~self.real] = _JUNK
        return values.to(self.rig.dtype)

    def _visible(self, group: str) -> Tensor:
        """Which slots each row sees: bool [T, slots]."""
        plan, size = self.cpu, self.rig.block_size
        seen = torch.zeros(self.rows, self.rig.blocks * size, dtype=torch.bool)
        for row in range(self.rows):
            position = torch.arange(int(plan.visible[row]))
            table = plan.block_tables[group][plan.row_request[row]].long()
            seen[row, table[position // size] * size + position % size] = True
        return seen

    def positions_to_slots(self, positions: Tensor, group: str = "latent") -> Tensor:
        """int32 [T, K] of positions [T, K], -1 behind."""
        plan, size = self.cpu, self.rig.block_size
        inside = positions.clamp(min=0).long()
        table = plan.block_tables[group].long()
        pages = table[plan.row_request.unsqueeze(-1), inside // size]
        return torch.where(positions < 0, -1, pages * size + inside % size).to(torch.int32)

    def selection(self, topk: int) -> Selection:
        """Some of each row's visible keys, on the CPU: as many as may be, or only a few."""
        positions = torch.full((self.rows, topk), -1, dtype=torch.int32)
        lens = torch.zeros(self.rows, dtype=torch.int32)
        for row in range(self.rows):
            visible = int(self.cpu.visible[row])
            count = min(topk, visible)
            if row % 3 == 2:
                count = min(count, 1 + row % 4)
            chosen = self.draw.permutation(visible)[:count].sort().values
            positions[row, :count] = chosen.to(torch.int32)
            lens[row] = count
        return Selection(
            positions,
            lens,
            self.positions_to_slots(positions),
            torch.zeros(self.rows, dtype=torch.bool),
        )

    def mask(self, selection: Selection | None) -> Tensor:
        """Which slots a row attends to: bool [T, slots]."""
        if selection is None:
            return self.visible
        slots = selection.slots.cpu().long()
        mask = torch.zeros(self.rows, self.visible.shape[1] + 1, dtype=torch.bool)
        return mask.scatter(1, torch.where(slots < 0, self.visible.shape[1], slots), True)[:, :-1]

    def moved(self, selection: Selection | None) -> Selection | None:
        if selection is None:
            return None
        return Selection(*(part.to(self.rig.device) for part in selection))


def calls(
    rig: Rig, stage: str, spec: LayerSpec, plan: StepPlan
) -> list[tuple[str, Callable[..., Any]]]:
    """Every way in which a stage can be served here: what the session accepts, best first; then
    core's composition of the parts that it would take.
    """
    own = [
        (candidate.provider, candidate.call)
        for candidate in rig.session.providers(stage, spec, plan.shape)
        if isinstance(candidate, Accepted)
    ]
    context = replace(rig.context, layer=spec)
    return [*own, ("composed", _composed(rig.session, context, stage, spec, plan.shape))]


def composed(
    session: Session, ops: Ops, stage: str, spec: LayerSpec, shape: StepShape
) -> Callable[..., Any]:
    """Core's composition of a stage of one layer, whose dtype is that of what it is given."""
    model = ModelSpec("stage", 0, spec.hidden_size, spec.norm_eps, 0, False, (spec,))
    collectives = session.collectives or SingleRank()
    context = StageContext(model, spec, ops, collectives, torch.float32)
    return _composed(session, context, stage, spec, shape)


def _composed(
    session: Session, context: StageContext, stage: str, spec: LayerSpec, shape: StepShape
) -> Callable[..., Any]:
    children = {}
    for child in _CHILDREN.get(stage, ()):
        if child == "select" and not spec.owns_index:
            continue
        own = [
            candidate.call
            for candidate in session.providers(child, spec, shape)
            if isinstance(candidate, Accepted)
        ]
        children[child] = own[0] if own else _composed(session, context, child, spec, shape)
    return _BUILDERS[stage](context, children)


def global_stage(
    rig: Rig, stage: str, shape: StepShape | VisionShape
) -> list[tuple[str, Callable[..., Any]]]:
    """A stage of the whole model as core binds it, and each candidate that the session accepts."""
    rig.exercise(f"stage:{stage}")
    bound, choice = bind_global_stage(stage, rig.session, rig.context, shape)
    candidates = rig.session.providers(stage, None, shape)
    own = [(one.provider, one.call) for one in candidates if isinstance(one, Accepted)]
    return [(f"{choice.provider} (as bound by core)", bound), *own]
