"""How weights and plans are cut for a mesh, by value and without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from ml4core.api import Segment, StepPlan, StepShape, Weight
from ml4core.compose.ops.weights import quantize
from ml4core_conformance import tiny
from ml4core_tpu.bridge import to_jax
from ml4core_tpu.expert_weights import packed_by_width, packed_experts
from ml4core_tpu.kernels.layer.cuts import cut_refusals
from ml4core_tpu.kernels.layer.form import Matrix, form_of
from ml4core_tpu.kernels.layer.mesh import ranked_rows, weight_specs
from ml4core_tpu.kernels.layer.products import PACKED, experts
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.live_requests import live_requests

EXPERTS, WIDTH, HIDDEN, RANKS, ROWS = 4, 256, 128, 2, 8
FORM = form_of(tiny.model().layers[1], Rows("wide", 512, 64))
QUICK = {("fp8_block", True), ("nvfp4", True)}
SLOW = pytest.mark.slow


def stack(format: str, *shape: int) -> Weight:
    draw = torch.Generator().manual_seed(shape[1])
    values = torch.randn(shape, generator=draw) / 16
    if format == "bf16":
        return Weight(format, shape, {"data": values.bfloat16()})
    return quantize(values, format)


def matrix(weight: Weight) -> Matrix:
    return Matrix({name: to_jax(part) for name, part in weight.parts.items()}, weight.format)


def share(value: Matrix, specs: Matrix, rank: int) -> Matrix:
    """What a tensor rank has of a matrix by its specs."""

    def cut(part: Any, spec: P) -> Any:
        for axis, over in enumerate(spec):
            if over:
                part = jnp.split(part, RANKS, axis)[rank]
        return part

    parts = {name: cut(part, specs.parts[name]) for name, part in value.parts.items()}
    return Matrix(parts, value.format)


@pytest.mark.parametrize(
    ("format", "by_width"),
    [
        pytest.param(format, by_width, marks=() if (format, by_width) in QUICK else [SLOW])
        for format in ("bf16", "fp8_block", "nvfp4", "mxfp4")
        for by_width in (False, True)
    ],
)
def test_shares_of_experts_add_up(format: str, by_width: bool) -> None:
    w13, w2 = stack(format, EXPERTS, 2 * WIDTH, HIDDEN), stack(format, EXPERTS, HIDDEN, WIDTH)
    packs = format in ("nvfp4", "mxfp4")
    alone = [packed_experts(w13, 2), packed_experts(w2, 1)] if packs else [w13, w2]
    held = alone
    if packs and by_width:
        held = [packed_by_width(w13, 2, RANKS), packed_by_width(w2, 1, RANKS)]
    both = dict(zip(("experts_w13", "experts_w2"), map(matrix, held), strict=True))
    specs = weight_specs(both, by_width)
    if by_width and not packs:
        gated = both["experts_w13"].parts.items()
        parts = {name: ranked_rows(part, RANKS, 1) for name, part in gated}
        both["experts_w13"] = Matrix(parts, format)
    draw = torch.Generator().manual_seed(1)
    x = to_jax(torch.randn(ROWS, HIDDEN, generator=draw))
    ids = to_jax(torch.stack([torch.randperm(EXPERTS, generator=draw)[:2] for _ in range(ROWS)]))
    given = (to_jax(torch.rand(ROWS, 2, generator=draw)), ids)

    def out(w13: Matrix, w2: Matrix, first: int) -> jax.Array:
        return experts(FORM, x, w13, w2, *given, jnp.array([first]), total=EXPERTS)

    want = out(matrix(alone[0]), matrix(alone[1]), 0)
    each = 0 if by_width else EXPERTS // RANKS
    found = sum(
        out(*(share(both[name], specs[name], rank) for name in both), rank * each)
        for rank in range(RANKS)
    )
    assert both["experts_w13"].format == (PACKED + format if packs else format)
    error = float(np.abs(np.asarray(found) - np.asarray(want)).max())
    assert error < 1e-2 * float(np.abs(np.asarray(want)).max())


def test_parts_of_a_matrix_that_have_no_such_axis_stay_whole() -> None:
    two = Matrix({"data": np.zeros((8, 4)), "scale": np.zeros((8, 1)), "global_scale": np.zeros(8)},
                 "nvfp4")  # fmt: skip
    one = Matrix({"data": np.zeros((8, 8)), "scale": np.zeros(())}, "fp8_tensor")
    specs = weight_specs({"wo": two, "wq": two, "shared_w2": one, "first_expert": np.zeros(1)})
    assert specs["wo"].parts == {
        "data": P(None, "tensor"), "scale": P(None, "tensor"), "global_scale": P()
    }  # fmt: skip
    assert set(specs["wq"].parts.values()) == {P("tensor")}
    assert specs["shared_w2"].parts == {"data": P(None, "tensor"), "scale": P()}
    assert specs["first_expert"] == P(("data", "tensor"))


def test_what_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="6 rows of gate over up don't divide into 2"):
        ranked_rows(np.zeros((6, 2)), 2)
    with pytest.raises(ValueError, match="3 groups of 16 columns of nvfp4 don't divide into 2"):
        packed_by_width(stack("nvfp4", 2, 32, 48), 1, 2)


LAYER = tiny.model().layers[1]  # 8 heads

CUTS = [
    ("wo", "fp8_block", (128, 480), 240, 128, "1"),
    ("wo", "fp8_block", (128, 768), 384, 128, ""),
    ("wq", "fp8_block", (480, 128), 240, 128, "1"),
    ("shared_w13", "fp8_block", (768, 128), 192, 128, "1"),
    ("dense_w2", "fp8_block", (128, 256), 128, 128, ""),
    ("wo", "fp8_tensor", (128, 480), 240, 1, ""),
    ("wo", "nvfp4", (32, 48), 24, 16, "1"),
    ("wo", "mxfp4", (32, 96), 48, 32, "1"),
    ("wo", "mxfp4", (32, 64), 32, 32, ""),
    ("experts_w2", "nvfp4", (4, 32, 48), 24, 16, "1; or --enable-expert-parallel"),
    ("experts_w2", "mxfp4", (4, 32, 96), 48, 32, "1; or --enable-expert-parallel"),
    ("experts_w13", "mxfp4", (4, 96, 32), 24, 1, ""),
    ("experts_w13", "fp8_block", (4, 384, 128), 96, 128, "1; or --enable-expert-parallel"),
]


@pytest.mark.parametrize(("name", "format", "shape", "each", "block", "works"), CUTS)
def test_blocks_are_never_cut(
    name: str, format: str, shape: tuple[int, ...], each: int, block: int, works: str
) -> None:
    """Else a rank's values meet scales of others: wrong numbers, and no error."""
    weight = stack(format, *shape)
    found = [*cut_refusals(LAYER, {name: weight}, RANKS, by_width=True)]
    if not works:
        assert found == []
        return
    (refusal,) = found
    assert f"layer 1: {name}: {2 * each}" in refusal.reason
    assert f"over 2 tensor ranks are {each} each" in refusal.reason
    assert f"not a multiple of {block}, the block of {format}" in refusal.reason
    assert refusal.remedy.startswith(f"--tensor-parallel-size {works}")
    assert not [*cut_refusals(LAYER, {name: weight}, 1, by_width=True)]


def test_whole_experts_and_heads_are_cut_anywhere() -> None:
    odd = {"experts_w2": stack("nvfp4", 4, 32, 48), "w_uk": stack("bf16", 8, 24, 40)}
    assert not [*cut_refusals(LAYER, odd, RANKS, by_width=False)]
    vector = {"ssmax_scale": torch.ones(8), "wkv_a": stack("fp8_block", 128, 100)}
    assert not [*cut_refusals(LAYER, vector, RANKS, by_width=True)]


def test_sizes_that_work_are_those_of_whole_blocks_and_heads() -> None:
    (refusal,) = cut_refusals(LAYER, {"wo": stack("fp8_block", 128, 768)}, 4, by_width=False)
    assert "768 columns over 4 tensor ranks are 192 each" in refusal.reason
    assert refusal.remedy == "--tensor-parallel-size 1 or 2"


def plan_of(visible: list[int], owner: list[int], starts: list[int]) -> StepPlan:
    rows, requests = len(visible), len(starts) - 1
    none = Segment(0, 0, 0)
    shape = StepShape(Segment(requests, rows, rows), none, none, (("latent", 2),), 1)
    ids = torch.arange(rows)
    return StepPlan(
        shape,
        ids,
        ids,
        torch.tensor(owner),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(visible, dtype=torch.int32),
        {"latent": torch.arange(2 * requests, dtype=torch.int32).view(requests, 2)},
        {"latent": ids},
        ids[:1],
    )


def test_requests_of_other_hosts_go() -> None:
    """Of five, two have rows that see something; rows of the others stand among theirs."""
    plan = plan_of([0, 3, 0, 1, 2], [0, 1, 2, 3, 3], [0, 1, 2, 3, 5, 5])
    found = live_requests(plan, 2)
    assert found.query_start.tolist() == [0, 3, 5]
    assert found.row_request.tolist() == [0, 0, 0, 1, 1]
    assert found.block_tables["latent"].tolist() == [[2, 3], [6, 7]]
    assert live_requests(plan, 5) is plan
    assert live_requests(plan, 1) is plan  # more than that are live
    idle = live_requests(replace(plan, visible=torch.zeros(5, dtype=torch.int32)), 2)
    assert idle.query_start.tolist() == [0, 5]
    assert idle.row_request.tolist() == [0] * 5
