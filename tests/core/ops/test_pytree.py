"""Data classes of the API as arguments of exported functions."""

from __future__ import annotations

import importlib
from types import MappingProxyType

import torch
from torch.utils import _pytree as pytree

import ml4core.compose.pytree
from ml4core.api import KVCache, Segment, StepPlan, StepShape, Weight
from ml4core.api.known_layouts import latent_layout


def plan(rows: int = 2) -> StepPlan:
    none = Segment(0, 0, 0)
    shape = StepShape(Segment(rows, rows, 1), none, none, (("latent", 4),), rows)
    ids = torch.arange(rows)
    tables = {"latent": torch.zeros(rows, 4, dtype=torch.int32)}
    return StepPlan(
        shape=shape,
        token_ids=ids,
        positions=ids,
        row_request=ids,
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        visible=ids.to(torch.int32) + 1,
        block_tables=MappingProxyType(tables),
        slots=MappingProxyType({"latent": ids}),
        logits_indices=ids,
    )


def test_a_plan_and_its_mappings() -> None:
    leaves, spec = pytree.tree_flatten(plan())
    assert sum(leaf is not None for leaf in leaves) == 8, "a step without images has no more"
    again = pytree.tree_unflatten(leaves, spec)
    assert again.shape == plan().shape
    assert torch.equal(again.block_tables["latent"], plan().block_tables["latent"])
    assert spec == pytree.tree_structure(plan())
    assert spec != pytree.tree_structure(plan(3))


def test_a_weight_keeps_its_format_shape_and_names() -> None:
    weight = Weight("mxfp4", (2, 32), {"data": torch.ones(2, 16), "scale": torch.ones(2, 1)})
    leaves, spec = pytree.tree_flatten(weight)
    again = pytree.tree_unflatten(leaves, spec)
    assert (again.format, again.shape, list(again.parts)) == ("mxfp4", (2, 32), ["data", "scale"])


def test_importing_again_changes_nothing() -> None:
    before = {cls: pytree.SUPPORTED_NODES[cls] for cls in (Weight, KVCache, StepPlan)}
    importlib.reload(ml4core.compose.pytree)
    assert {cls: pytree.SUPPORTED_NODES[cls] for cls in before} == before


class Step(torch.nn.Module):
    def forward(self, step: StepPlan, cache: KVCache, weight: Weight) -> torch.Tensor:
        cache.parts[0][0, 0] = step.positions.sum() + 1.0
        return weight.data[step.token_ids] * cache.parts[0].sum()


def test_export_with_all_three() -> None:
    layout = latent_layout("fp32", 4, 0)

    def arguments(value: float) -> tuple[StepPlan, KVCache, Weight]:
        cache = KVCache(layout, 2, (torch.full((3, 2, 4), value),))
        return plan(), cache, Weight("fp32", (5, 4), {"data": torch.full((5, 4), value)})

    program = torch.export.export(Step(), arguments(1.0), strict=False)
    mine, theirs = arguments(3.0), arguments(3.0)
    assert torch.equal(program.module()(*theirs), Step()(*mine))
    assert torch.equal(theirs[1].parts[0], mine[1].parts[0])
    assert mine[1].parts[0][0, 0].tolist() == [2.0] * 4
