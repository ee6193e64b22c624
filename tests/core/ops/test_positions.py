"""Rotation and the scale of queries, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ml4core.api import SSMaxSpec
from ml4core.compose.ops import COMPOSED

from .support import Check, Draw, assert_close, corner_cases

rope, ssmax = COMPOSED["rope"], COMPOSED["ssmax"]


def frequencies(width: int) -> Tensor:
    return torch.tensor([10000.0 ** (-2 * j / width) for j in range(width // 2)])


def rope_reference(
    x: Tensor, positions: Tensor, inv_freq: Tensor, interleaved: bool, magnitude: float
) -> Tensor:
    out = x.double().clone()
    half = x.shape[-1] // 2
    for t, position in enumerate(positions.tolist()):
        for j, frequency in enumerate(inv_freq.tolist()):
            a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
            cos = math.cos(position * frequency) * magnitude
            sin = math.sin(position * frequency) * magnitude
            first, second = x[t, :, a].double(), x[t, :, b].double()
            out[t, :, a] = first * cos - second * sin
            out[t, :, b] = first * sin + second * cos
    return out


def check_rope(
    positions: list[int],
    interleaved: bool = True,
    dtype: torch.dtype = torch.float32,
    magnitude: float = 1.0,
    width: int = 64,
) -> None:
    x = Draw(1).normal(len(positions), 3, width, dtype=dtype)
    where, inv_freq = torch.tensor(positions), frequencies(width)
    got = rope(x, where, inv_freq, interleaved, magnitude)
    assert got.dtype == dtype
    want = rope_reference(x, where, inv_freq, interleaved, magnitude)
    assert_close(got, want, x.double().abs().amax() * magnitude, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope(interleaved: bool, dtype: torch.dtype) -> None:
    check_rope([0, 1, 77, 4095, 123456], interleaved, dtype, 1.3)


def test_rope_of_a_strided_input() -> None:
    x, inv_freq = Draw(2).normal(3, 2, 48), frequencies(16)
    positions = torch.tensor([5, 6, 7])
    part = x[..., 32:]
    want = rope(part.contiguous(), positions, inv_freq, True, 1.0)
    assert torch.equal(rope(part, positions, inv_freq, True, 1.0), want)


def position_zero() -> None:
    x = Draw(3).normal(2, 2, 16)
    for interleaved in (True, False):
        got = rope(x, torch.zeros(2, dtype=torch.int64), frequencies(16), interleaved, 1.0)
        assert torch.equal(got, x)


def width_zero() -> None:
    x = torch.empty(3, 2, 0)
    got = rope(x, torch.tensor([1, 2, 3]), torch.empty(0), True, 1.0)
    assert got.shape == x.shape


def both_pairings() -> None:
    """B005: e0 at position 1 goes to lanes 0 and 1, or to lanes 0 and 32."""
    x = torch.zeros(1, 1, 64)
    x[..., 0] = 1
    for interleaved, lane in ((True, 1), (False, 32)):
        got = rope(x, torch.tensor([1]), frequencies(64), interleaved, 1.0)[0, 0]
        assert got.nonzero().flatten().tolist() == [0, lane]
        torch.testing.assert_close(got[0].item(), math.cos(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(got[lane].item(), math.sin(1), rtol=1e-6, atol=0)


def test_rope_needs_a_frequency_for_each_pair() -> None:
    with pytest.raises(ValueError, match="width 64 needs 32 frequencies, got 16"):
        rope(torch.zeros(1, 1, 64), torch.tensor([0]), frequencies(32), True, 1.0)


def factors(spec: SSMaxSpec, positions: list[int], *learned: Tensor) -> Tensor:
    heads = learned[0].shape[0] if learned else 1
    return ssmax(torch.ones(len(positions), heads, 1), torch.tensor(positions), spec, *learned)[
        ..., 0
    ]


def llama4_window_edges() -> None:
    """B044: the factor steps with the global position."""
    got = factors(SSMaxSpec("llama4"), [0, 8191, 8192, 16384, 65536])
    want = torch.tensor([1.0, 1.0, 1.0693147, 1.1098612, 1.2197225])
    torch.testing.assert_close(got[:, 0], want, rtol=1e-6, atol=0)


def by_formula(kind: str, n: int, beta: float, original: int, scale: float) -> float:
    return {
        "none": 1.0,
        "llama4": 1 + beta * math.log(1 + (n - 1) // original),
        "log": scale * math.log(n),
        "pow": (1 + n / original) ** beta,
        "floor": 1 + beta * math.log(max(n / original, 1)),
    }[kind]


KINDS = ("none", "llama4", "log", "pow", "floor")
POSITIONS = [0, 1, 99, 100, 101, 2047, 99_999, 2**20]


@pytest.mark.parametrize("limit", [None, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_ssmax(kind: str, limit: int | None) -> None:
    spec = SSMaxSpec(kind, beta=0.2, original_max_position=100, scale=0.7, n_limit=limit)
    got = factors(spec, POSITIONS)
    n = [min(p + 1, limit or 2**60) for p in POSITIONS]
    want = torch.tensor([[by_formula(kind, i, 0.2, 100, 0.7)] for i in n], dtype=torch.float64)
    assert_close(got, want, want.abs(), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_ssmax_multiplies_the_whole_head(kind: str) -> None:
    spec = SSMaxSpec(kind, original_max_position=100)
    x, positions = Draw(4).normal(3, 2, 5), torch.tensor([3, 100, 5000])
    got = ssmax(x, positions, spec)
    torch.testing.assert_close(got, x * factors(spec, positions.tolist())[:, :, None])
    narrow = ssmax(x.bfloat16(), positions, spec)
    assert narrow.dtype == torch.bfloat16
    want = x.bfloat16().float() * factors(spec, positions.tolist())[:, :, None]
    assert torch.equal(narrow, want.bfloat16())


def per_head() -> None:
    scale, bias = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.0, 1.0, -0.25])
    for kind in KINDS:
        spec = SSMaxSpec(kind, per_head=True, original_max_position=100, scale=7.0)
        got = factors(spec, POSITIONS, scale)
        value = [by_formula(kind, p + 1, 0.1, 100, 1.0) for p in POSITIONS]
        want = torch.tensor(value, dtype=torch.float64)[:, None] * scale
        assert_close(got, want, want.abs(), 4)
    spec = SSMaxSpec("log", per_head=True, bias=True)
    got = factors(spec, POSITIONS, scale, bias)
    value = torch.tensor([math.log(p + 1) for p in POSITIONS], dtype=torch.float64)
    assert_close(got, value[:, None] * scale + bias, value[:, None] * scale.abs() + bias.abs(), 4)


def ssmax_position_zero() -> None:
    for kind, value in zip(KINDS, (1.0, 1.0, 0.0, 1.01**0.1, 1.0), strict=True):
        got = factors(SSMaxSpec(kind, original_max_position=100), [0])
        torch.testing.assert_close(got.item(), value, rtol=1e-6, atol=0)


def test_only_log_has_a_bias() -> None:
    with pytest.raises(ValueError, match="kind 'pow' has no bias"):
        ssmax(torch.ones(1, 1, 1), torch.tensor([0]), SSMaxSpec("pow"), None, torch.ones(1))


CORNERS: dict[str, dict[str, Check]] = {
    "rope": {
        "position 0": position_zero,
        "position 2^20": lambda: check_rope([2**20, 2**20 - 1, 999_983]),
        "width 0 is the identity": width_zero,
        "both pairings": both_pairings,
    },
    "ssmax": {
        "position 0": ssmax_position_zero,
        "either side of original_max_position": llama4_window_edges,
        "per head": per_head,
    },
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
