"""Routing, routed experts, and the feed-forward stage as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ml4core.api import LayerSpec, MoESpec, SSMaxSpec, Weight
from ml4core.compose.context import StageContext
from ml4core.compose.ffn import ffn
from ml4core.compose.ops import COMPOSED
from ml4core.engine.collectives import SingleRank
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import cases_of
from ml4core_cuda.ffn_stage import ACTS

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

ROUTERS = cases_of("router")
EXPERTS = [
    case
    for case in cases_of("moe_experts")
    if (case.variant.endswith("+bf16") and case.name not in ("long", "none"))
    or case.options.get("act") in ACTS
    or case.variant == "bf16+fp32"
]
MAIN = ("fp8_block+", "mxfp4+")
BY_FORMAT = {"one", "rows", "long"}
"""A row apart, rows together and long sums, which read a format each in its own way. What else
there is, orders and borders, is the same code for every format: beside the main ones, for
`make test-full`.
"""


def _marked(case: OpCase) -> Any:
    slow = case.name not in BY_FORMAT and not case.variant.startswith(MAIN)
    return pytest.param(case, marks=[pytest.mark.slow] if slow else [], id=case.id)


@pytest.mark.parametrize("case", ROUTERS, ids=lambda case: case.id)
def test_router(case: OpCase, judged: Callable[..., None]) -> None:
    from ml4core_triton.kernels.router import router

    judged(router, case)


@pytest.mark.parametrize("case", [_marked(case) for case in EXPERTS])
def test_experts(case: OpCase, judged: Callable[..., None]) -> None:
    from ml4core_cuda.kernels.moe_experts import moe_experts

    judged(moe_experts, case)


def test_choices_are_in_the_order_of_experts_and_none_is_lost(device: torch.device) -> None:
    from ml4core_triton.kernels.expert_order import expert_order

    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (70, 3), generator=draw).to(device)
    weights = torch.rand(70, 3, generator=draw).to(device)
    weights[5:9] = 0
    found = expert_order(ids, weights, 5, 2, 16)
    flat = (ids.flatten() - 2).cpu()
    mine = (flat >= 0) & (flat < 5) & (weights.flatten().cpu() != 0)
    wanted = [[int(i) for i in (mine & (flat == e)).nonzero()] for e in range(5)]
    got: list[list[int]] = [[] for _ in range(5)]
    for expert, first, count in found.tiles.tolist():
        assert count <= 16
        got[expert] += found.order[first : first + count].tolist()
    assert got == wanted


def _weight(draw: torch.Generator, device: torch.device, *shape: int) -> Weight:
    data = torch.randn(shape, generator=draw) * shape[-1] ** -0.5
    return Weight("fp32", shape, {"data": data.to(device)})


def _layer(moe: MoESpec, width: int) -> LayerSpec:
    return LayerSpec(
        index=1, hidden_size=width, heads=1, kv_lora_rank=8, q_lora_rank=None, nope_dim=8,
        rope_dim=0, v_dim=8, norm_eps=1e-6, softmax_scale=1.0, rope=None, ssmax=SSMaxSpec(),
        kv_source=1, topk_source=None, indexer=None, dense_width=None, moe=moe,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("shared", [96, 64, 0], ids=["folded", "apart", "none"])
def test_the_stage_is_its_composition(rows: int, shared: int, device: torch.device) -> None:
    from ml4core_cuda.kernels.ffn import moe_ffn

    width, moe = 128, MoESpec(8, 3, 96, shared, routed_scale=1.5)
    draw = torch.Generator().manual_seed(rows)
    weights: dict[str, Any] = {
        "gate": torch.randn(8, width, generator=draw).to(device),
        "experts_w13": _weight(draw, device, 8, 2 * 96, width),
        "experts_w2": _weight(draw, device, 8, width, 96),
    }
    if shared:
        weights["shared_w13"] = _weight(draw, device, 2 * shared, width)
        weights["shared_w2"] = _weight(draw, device, width, shared)
    residual, hidden = (torch.randn(rows, width, generator=draw).to(device) for _ in range(2))
    if rows > 1:
        hidden[4, 7] = torch.nan  # a row that can't be routed is NaN, and no other
    norm = 1 + 0.1 * torch.randn(width, generator=draw).to(device)
    layer = _layer(moe, width)
    context: Any = StageContext(None, layer, COMPOSED, SingleRank(), torch.float32)  # type: ignore
    wanted = ffn(context, {})(weights, residual, hidden, norm)
    found = moe_ffn(moe, layer.norm_eps, None)(weights, residual, hidden, norm)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)
    bare = moe_ffn(moe, layer.norm_eps, None)(weights, residual, hidden, None)
    assert bare[1] is None
    assert torch.equal(bare[0].nan_to_num(7.0), found[0].nan_to_num(7.0))
