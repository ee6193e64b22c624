"""Routing and routed experts against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.compose.ops import COMPOSED, grouped_gemm
from ml4core.compose.ops.weights import decode_weight

from .support import INF, NAN, Check, Draw, assert_close, corner_cases

router, moe_experts, quantize = COMPOSED["router"], COMPOSED["moe_experts"], COMPOSED["quantize"]

E, H, I, K = 5, 64, 32, 2  # noqa: E741
FORMATS = ("fp32", "bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4")


def router_reference(
    logits: Tensor, topk: int, renormalize: bool, scale: float
) -> tuple[list[float], list[int]]:
    """One row of logits [E], float64."""
    if not all(math.isfinite(v) or v == -INF for v in logits.tolist()):
        return [0.0] * topk, []
    odds = torch.softmax(logits.double(), -1).tolist()
    values = logits.tolist()
    ids = sorted(range(len(odds)), key=lambda e: (-values[e], e))[:topk]
    total = sum(odds[e] for e in ids) if renormalize else 1.0
    return [odds[e] / total * scale for e in ids], ids


def check_router(
    logits: Tensor, topk: int = 4, renormalize: bool = True, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The logits are made exact by an identity of activations."""
    experts = logits.shape[1]
    x, weight = torch.eye(logits.shape[0]), logits.T.contiguous()
    broken = ~torch.isfinite(logits)
    if broken.any():  # 0 * inf would spread
        x, weight = logits, torch.eye(experts)
    weights, ids = router(x, weight, topk, renormalize, scale)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert weights.shape == ids.shape == (logits.shape[0], topk)
    assert ((ids >= 0) & (ids < experts)).all()
    for t in range(logits.shape[0]):
        want, chosen = router_reference(logits[t], topk, renormalize, scale)
        if chosen:
            assert ids[t].tolist() == chosen
        assert len(set(ids[t].tolist())) == topk
        assert_close(weights[t], torch.tensor(want, dtype=torch.float64), 1.0, 8)
    return weights, ids


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("experts", [4, 128])
def test_router(experts: int, renormalize: bool, scale: float) -> None:
    check_router(Draw(experts).normal(9, experts) * 3, 4, renormalize, scale)


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 300])
def test_the_answer_to_a_row_does_not_depend_on_their_number(rows: int) -> None:
    logits = Draw(1).normal(300, 128).round(decimals=1)
    _, ids = check_router(logits[:rows])
    _, alone = check_router(logits[:1])
    assert torch.equal(ids[:1], alone)


def test_logits_are_fp32_whatever_the_activations() -> None:
    """Two experts closer than bf16 can tell, and apart in fp32."""
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.0], [1.0, 1e-4], [0.5, 0.0]])
    _, ids = router(x, weight, 2, True, 1.0)
    assert ids.tolist() == [[1, 0]]


def test_the_order_is_that_of_logits_where_odds_underflow() -> None:
    check_router(torch.tensor([[-200.0, 100.0, -150.0, -300.0, -90.0]]), 4)


def test_both_zeros_are_equal() -> None:
    _, ids = check_router(torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]]), 4)
    assert ids.tolist() == [[0, 1, 2, 3]]


def router_ties() -> None:
    """B132: the lowest id wins, at the border and inside."""
    check_router(torch.zeros(2, 128))
    check_router(torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 2.0, 0.0]]))


def all_negative() -> None:
    """B076."""
    logits = (-50 - 0.1 * torch.arange(128.0)).unsqueeze(0)
    weights, ids = check_router(logits)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert [round(w, 4) for w in weights[0].tolist()] == [0.2887, 0.2612, 0.2363, 0.2138]


def nan_row() -> None:
    logits = Draw(2).normal(4, 16)
    logits[1, 3] = NAN
    logits[2] = NAN
    weights, ids = router(logits, torch.eye(16), 4, True, 1.0)
    assert ((ids >= 0) & (ids < 16)).all()
    assert torch.equal(weights[1:3], torch.zeros(2, 4))
    for t in (0, 3):
        want, chosen = router_reference(logits[t], 4, True, 1.0)
        assert ids[t].tolist() == chosen
        assert_close(weights[t], torch.tensor(want, dtype=torch.float64), 1.0, 8)
    for value in (INF, -INF):
        weights, ids = router(torch.full((1, 16), value), torch.eye(16), 4, False, 1.0)
        assert torch.equal(weights, torch.zeros(1, 4))
        assert ((ids >= 0) & (ids < 16)).all()


def experts_reference(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum [T, H], and the size of what a sum in fp32 would round."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    size = torch.zeros_like(out)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
            row, first, second = x[t].double(), w13[e].double(), w2[e].double()
            gate, up = (first @ row).chunk(2)
            gate_size, up_size = (first.abs() @ row.abs()).chunk(2)
            inner = gate * torch.sigmoid(gate) * up
            out[t] += weight * (second @ inner)
            size[t] += weight.abs() * (second.abs() @ (gate_size * up_size))
    return out, size


def check_experts(
    ids: Tensor,
    format: str = "fp32",
    dtype: torch.dtype = torch.float32,
    weights: Tensor | None = None,
) -> None:
    draw = Draw(3)
    rows = ids.shape[0]
    x = draw.normal(rows, H, dtype=dtype)
    w13 = quantize(draw.normal(E, 2 * I, H) * H**-0.5, format)
    w2 = quantize(draw.normal(E, H, I) * I**-0.5, format)
    weights = draw.uniform(*ids.shape) if weights is None else weights
    got = moe_experts(x, w13, w2, weights, ids)
    assert got.dtype == dtype
    want, size = experts_reference(x, decode_weight(w13), decode_weight(w2), weights, ids)
    assert_close(got, want, size, H)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_experts(format: str, dtype: torch.dtype, rows: int) -> None:
    ids = torch.stack([Draw(rows + t).permutation(E)[:K] for t in range(rows)])
    check_experts(ids, format, dtype)


@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_no_rows_at_all(format: str) -> None:
    check_experts(torch.zeros(0, K, dtype=torch.int64), format)


def no_weight() -> None:
    """Padded rows have ids in range and weight 0; so has a row whose router saw NaN."""
    ids = Draw(4).integers(0, E, 6, K)
    weights = Draw(5).uniform(6, K)
    weights[2], weights[4, 0] = 0, 0
    check_experts(ids, weights=weights)
    x = Draw(6).normal(6, H)
    w13, w2 = (
        quantize(Draw(s).normal(*shape), "fp32")
        for s, shape in ((7, (E, 2 * I, H)), (8, (E, H, I)))
    )
    want = moe_experts(x, w13, w2, weights, ids)
    x[2] = NAN
    got = moe_experts(x, w13, w2, weights, ids)
    assert torch.equal(got, want)
    assert torch.equal(got[2], torch.zeros(H))


def test_the_order_of_choices_is_the_order_of_the_sum() -> None:
    """Large terms that cancel leave the same rest whatever else is in the batch."""
    draw = Draw(9)
    w13, w2 = quantize(draw.normal(E, 2 * I, H), "fp32"), quantize(draw.normal(E, H, I), "fp32")
    x, ids, weights = draw.normal(8, H), draw.integers(0, E, 8, K), draw.uniform(8, K)
    first = moe_experts(x, w13, w2, weights, ids)
    for _ in range(3):
        assert torch.equal(moe_experts(x, w13, w2, weights, ids), first)
    order = draw.permutation(8)
    torch.testing.assert_close(
        moe_experts(x[order], w13, w2, weights[order], ids[order]),
        first[order],
        rtol=1e-4,
        atol=1e-3,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["_by_group", "_by_row"])
def test_kernels_of_the_grouped_product(name: str, dtype: torch.dtype) -> None:
    """One is for the host, one for devices without a kernel of their own; both are plain torch."""
    draw = Draw(10)
    x, w = draw.normal(9, 16, dtype=dtype), draw.normal(4, 6, 16, dtype=dtype)
    ends = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    group = [1] * 5 + [3] * 4
    got = getattr(grouped_gemm, name)(x, w, ends)
    want = torch.stack([w[g].double() @ x[t].double() for t, g in enumerate(group)])
    size = torch.stack([w[g].double().abs() @ x[t].double().abs() for t, g in enumerate(group)])
    assert got.dtype == torch.float32
    assert_close(got, want, size, 16)


def test_the_grouped_product_tells_its_shape() -> None:
    torch.library.opcheck(
        torch.ops.ml4core.grouped_gemm.default,
        (torch.ones(3, 8), torch.ones(2, 5, 8), torch.tensor([1, 3], dtype=torch.int32)),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_weight_may_hold_its_bf16_data_in_any_stack() -> None:
    data = Draw(11).normal(E, 2 * I, H).bfloat16()
    w13 = Weight("bf16", tuple(data.shape), {"data": data})
    w2 = quantize(Draw(12).normal(E, H, I), "bf16")
    x, ids = Draw(13).normal(2, H), torch.tensor([[0, 4], [4, 1]])
    weights = torch.full((2, K), 0.5)
    want, size = experts_reference(x, data, w2.data, weights, ids)
    assert_close(moe_experts(x, w13, w2, weights, ids), want, size, H)


def other_ranks() -> None:
    """Shares of ranks that hold some experts add up to all; a NaN row of others stays out."""
    draw = Draw(14)
    x, ids = draw.normal(9, H), torch.arange(18).view(9, 2) * 7 % E
    w13, w2 = draw.normal(E, 2 * I, H), draw.normal(E, H, I)
    weights = draw.uniform(9, 2)
    want, size = experts_reference(x, w13, w2, weights, ids)
    total = torch.zeros(9, H)
    for first, last in ((0, 1), (1, 4), (4, E)):
        mine = [quantize(w[first:last].contiguous(), "fp32") for w in (w13, w2)]
        total += moe_experts(x, *mine, weights, ids, first)
    assert_close(total, want, size, H)
    nan = torch.full((2, H), NAN)
    away = moe_experts(nan, *(quantize(w[:2], "fp32") for w in (w13, w2)), weights[:2], ids[:2], E)
    assert torch.equal(away, torch.zeros(2, H))


CORNERS: dict[str, dict[str, Check]] = {
    "router": {
        "ties": router_ties,
        "all negative": all_negative,
        "NaN row": nan_row,
        "no renormalisation": lambda: test_router(128, False, 1.0),
    },
    "moe_experts": {
        "one row": lambda: check_experts(torch.tensor([[4, 2]])),
        "an expert without tokens": lambda: check_experts(torch.tensor([[0, 4], [4, 0], [0, 2]])),
        "all tokens to one expert": lambda: check_experts(torch.full((7, 1), 3)),
        "weight 0": no_weight,
        "experts of another rank": other_ranks,
    },
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
