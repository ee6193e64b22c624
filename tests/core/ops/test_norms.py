"""Norms against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml4core.compose.ops import COMPOSED

from .support import Check, Draw, assert_close, corner_cases

rms_norm, layer_norm = COMPOSED["rms_norm"], COMPOSED["layer_norm"]
all_reduce_rms_norm = COMPOSED["all_reduce_rms_norm"]
EPS = 1e-6


def rms_reference(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def check_rms(x: Tensor, weight: Tensor) -> None:
    want = rms_reference(x, weight)
    got = rms_norm(x, weight, EPS)
    assert got.dtype == x.dtype
    assert_close(got, want, want.abs(), x.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 96), (1, 1), (2, 3, 130)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = Draw(1)
    check_rms(draw.normal(*shape, dtype=dtype) * 3, draw.normal(shape[-1], dtype=dtype))


def test_rms_norm_leaves_ordinary_rows_alone_whatever_stands_beside_them() -> None:
    draw = Draw(2)
    x, weight = draw.normal(3, 64), draw.normal(64)
    x[1] = 1e30
    assert torch.equal(rms_norm(x, weight, EPS)[0], rms_norm(x[:1], weight, EPS)[0])


@pytest.mark.parametrize("magnitude", [1e15, 2e19, 3e38])
def test_rms_norm_of_rows_that_overflow_when_squared(magnitude: float) -> None:
    draw = Draw(3)
    check_rms(draw.normal(2, 64).sign() * magnitude, draw.normal(64))


def layer_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return centred / (variance + EPS).sqrt() * weight.double() + bias.double()


def check_layer(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    got = layer_norm(x, weight, bias, EPS)
    assert got.dtype == torch.float32
    x64 = x.double()
    deviation = (x64.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
    size = (x64.abs().amax(-1, keepdim=True) / deviation) * weight.abs() + bias.abs()
    assert_close(got, layer_reference(x, weight, bias), size, x.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(dtype: torch.dtype) -> None:
    draw = Draw(4)
    check_layer(draw.normal(5, 3, 48, dtype=dtype) + 2, draw.normal(48), draw.normal(48))


def test_layer_norm_with_weights_of_each_head() -> None:
    draw = Draw(5)
    check_layer(draw.normal(5, 3, 48), draw.normal(3, 48), draw.normal(3, 48))


def constant_row() -> None:
    draw = Draw(6)
    weight, bias = draw.normal(128), draw.normal(128)
    for value in (0.0, 3.3, -1e4, 0.1):
        got = layer_norm(torch.full((2, 128), value), weight, bias, EPS)
        assert torch.equal(got, bias.expand(2, 128)), value


class TwoRanks:
    """The collectives of rank 0 of two, of which the other holds ``x`` too, times three."""

    rank, world_size = 0, 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + 3 * x


class OneRank:
    rank, world_size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def check_all_reduce(collectives: object, factor: int, dtype: torch.dtype, normed: bool) -> None:
    draw = Draw(7)
    x, residual, weight = (draw.normal(*s, dtype=dtype) for s in ((4, 96), (4, 96), (96,)))
    before = x.clone(), residual.clone()
    summed, hidden = all_reduce_rms_norm(x, residual, weight if normed else None, EPS, collectives)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    exact = residual.double() + (factor * x).double()
    assert_close(summed, exact, exact.abs() + 1, 2)
    if normed:
        assert_close(hidden, rms_reference(summed, weight), 4.0, 96)
    else:
        assert hidden is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_rms_norm(dtype: torch.dtype) -> None:
    check_all_reduce(TwoRanks(), 4, dtype, True)


def test_the_sum_is_formed_in_fp32_and_rounded_once() -> None:
    x = torch.tensor([[2.0**-8]], dtype=torch.bfloat16)
    residual = torch.tensor([[1.0]], dtype=torch.bfloat16)
    summed, _ = all_reduce_rms_norm(3 * x, residual, None, EPS, OneRank())
    assert summed.item() == 1.015625  # 1 + 3 * 2**-8 lies half way: ties to even


CORNERS: dict[str, dict[str, Check]] = {
    "rms_norm": {
        "all zero row": lambda: check_rms(torch.zeros(2, 64), torch.ones(64)),
        "huge row": lambda: check_rms(torch.tensor([[1e30, -2e30, 5e29, 0.0]]), torch.ones(4)),
        "one row": lambda: check_rms(Draw(8).normal(1, 64), torch.ones(64)),
    },
    "layer_norm": {
        "constant row": constant_row,
        "one row": lambda: check_layer(Draw(9).normal(1, 64), torch.ones(64), torch.zeros(64)),
    },
    "all_reduce_rms_norm": {
        "world 1": lambda: check_all_reduce(OneRank(), 1, torch.float32, True),
        "no weight": lambda: check_all_reduce(OneRank(), 1, torch.float32, False),
    },
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
