"""FP8 experts and products of few rows: ``row_turns`` and ``short_experts``, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml4core.api import MoESpec, Weight

pytestmark = pytest.mark.accelerator

WIDTH, TOPK = 512, 3


@pytest.fixture(scope="module")
def device() -> torch.device:
    from ml4core_cuda.kernels.target import gluon

    if not torch.cuda.is_available() or not gluon():
        pytest.skip("needs an NVIDIA GPU, and a triton whose Gluon is known")
    return torch.device("cuda")


def _numbers(weight: Weight) -> Tensor:
    from ml4core_cuda.measure.decoding import decoded

    if len(weight.shape) == 2:
        return decoded(weight).double()
    return torch.stack(
        [
            decoded(Weight(weight.format, weight.shape[1:], {n: p[e] for n, p in found})).double()
            for e, found in ((e, list(weight.parts.items())) for e in range(weight.shape[0]))
        ]
    )


def _expert(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = (w13 @ x.double()).chunk(2)
    return w2 @ (torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("inner", [256, 768])
@pytest.mark.parametrize("by_logits", [False, True], ids=["given", "by logits"])
def test_experts(by_logits: bool, inner: int, rows: int, device: torch.device) -> None:
    from ml4core_cuda.kernels import short_experts
    from ml4core_cuda.kernels.short_shapes import experts_fit
    from ml4core_cuda.measure.work import Draw
    from ml4core_triton.kernels.weights import weight_args

    count, experts = TOPK + 1, 8
    draw = Draw(rows + inner, device)
    routed = [
        draw.weight("fp8_block", experts, *shape) for shape in ((2 * inner, WIDTH), (WIDTH, inner))
    ]
    shared = [draw.weight("fp8_block", *s) for s in ((2 * inner, WIDTH), (WIDTH, inner))]
    x = draw.bf16(rows, WIDTH)
    moe = MoESpec(experts, TOPK, inner, inner, routed_scale=1.5)
    logits = draw.normal(rows, experts)
    logits[0, 1] = logits[0, 2]  # the lower one comes first
    shares, ids = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares, ids = shares[:, :TOPK], ids[:, :TOPK]
    if moe.renormalize:
        shares = shares / shares.sum(-1, keepdim=True)
    one = torch.ones_like(shares[:, :1])
    weights = torch.cat((shares * 1.5, one), 1).contiguous()
    ids = torch.cat((ids, torch.full_like(ids[:, :1], experts)), 1).contiguous()
    if not by_logits:
        weights[0, 1] = 0.0  # adds nothing, and isn't read
        ids[-1, 0] = experts + 5  # another rank's
    (w13, w2), (s13, s2) = (tuple(map(weight_args, pair)) for pair in (routed, shared))
    assert experts_fit(x, w13, w2, count)
    out = torch.full((rows, WIDTH), torch.nan, device=device)
    short_experts.launch(
        x, w13, w2, (s13, s2), logits if by_logits else weights, None if by_logits else ids, out,
        count=count, moe=moe if by_logits else None, ahead=True,
    )  # fmt: skip
    first, second = (
        torch.cat((_numbers(a), _numbers(b).unsqueeze(0)))
        for a, b in zip(routed, shared, strict=True)
    )
    wanted = torch.zeros(rows, WIDTH, dtype=torch.float64, device=device)
    for t, j in ((t, j) for t in range(rows) for j in range(count)):
        if ids[t, j] <= experts and weights[t, j] != 0:
            expert = int(ids[t, j])
            wanted[t] += weights[t, j].double() * _expert(x[t], first[expert], second[expert])
    assert (out.double() - wanted).abs().max() < 6e-3 * wanted.abs().max()


def test_a_row_that_can_not_be_judged_is_nan_and_others_are_not(device: torch.device) -> None:
    from ml4core_cuda.kernels import short_experts
    from ml4core_cuda.measure.work import Draw
    from ml4core_triton.kernels.weights import weight_args

    draw, inner, experts = Draw(5, device), 256, 8
    w13, s13 = (weight_args(draw.weight("fp8_block", *n, 2 * inner, WIDTH)) for n in ((8,), ()))
    w2, s2 = (weight_args(draw.weight("fp8_block", *n, WIDTH, inner)) for n in ((8,), ()))
    logits = draw.normal(2, experts)
    logits[1, 3] = torch.inf
    out = torch.zeros(2, WIDTH, device=device)
    short_experts.launch(
        draw.bf16(2, WIDTH), w13, w2, (s13, s2), logits, None, out, count=TOPK + 1,
        moe=MoESpec(experts, TOPK, inner, inner), ahead=False,
    )  # fmt: skip
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("shape", [(16, 256), (6144, 1024), (48, 768), (128, 8192)])
@pytest.mark.parametrize("rows", [1, 3])
def test_products(shape: tuple[int, int], rows: int, device: torch.device) -> None:
    from ml4core_cuda.kernels import row_turns
    from ml4core_cuda.kernels.short_shapes import product_fits
    from ml4core_cuda.measure.work import Draw
    from ml4core_triton.kernels.weights import weight_args

    draw = Draw(sum(shape), device)
    weight = draw.weight("fp8_block", *shape)
    x, matrix = draw.bf16(rows, shape[1]), weight_args(weight)
    assert product_fits(x, matrix)
    out = torch.full((rows, shape[0]), torch.nan, device=device)
    row_turns.row_product(x, matrix, out, ahead=True)
    wanted = x.double() @ _numbers(weight).T
    assert (out.double() - wanted).abs().max() < 1e-5 * (
        x.double().abs() @ _numbers(weight).abs().T
    ).max()
