"""The bound of FP8 sums on Hopper: such sums, made on the host, are within it, and no closer one
and no other device's would do; coarser sums are not.
"""

from __future__ import annotations

import pytest
import torch

from ml4core_conformance import compare
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import cases_of
from ml4core_conformance.oracle import oracle
from ml4core_conformance.oracle.expected import Float
from ml4core_conformance.tolerances import tolerance
from ml4core_triton.kernels.weights import K_TILE

from .fp8_sums import BITS, CHAINED, allowed, cut, cuts_sums

CASES = {case.name: case for case in cases_of("gemm") if case.variant == CHAINED[1]}
ROWS = CASES["rows"]
H200 = 132
"""Compute units, which decide in how many parts a product of few tiles is made."""


def expected(case: OpCase, seed: int) -> Float:
    want = oracle(case.op)(case.options, case.arguments(seed)).results["out"]
    assert isinstance(want, Float)
    return want


def made(case: OpCase, seed: int, bits: int) -> torch.Tensor:
    """bf16 [T, N], from sums that keep ``bits``, in the parts that our kernel has on an H200."""
    from ml4core.formats import e4m3
    from ml4core_rocm.kernels.gemm import tiling

    given = case.arguments(seed)
    x, parts = given["x"].float(), given["weight"].parts
    scale = (x.abs().amax(1, keepdim=True) / 448.0).clamp(min=1e-10 / 448.0)
    codes = e4m3.decode(e4m3.encode(x / scale, "e4m3fn"), "e4m3fn").double()
    weight = e4m3.decode(parts["data"], "e4m3fn").double()
    inner = x.shape[1]
    plan = tiling(len(x), len(weight), inner, 1, H200)
    tiles = -(-inner // K_TILE)
    each = -(-tiles // plan.parts) * K_TILE
    found = sum(
        cut(codes[:, begin : begin + each], weight[:, begin : begin + each], bits)
        for begin in range(0, inner, each)
    )
    assert isinstance(found, torch.Tensor)
    return (found * scale.double() * parts["scale"].double()).bfloat16()


def off(case: OpCase, found: torch.Tensor, want: Float) -> tuple[float, float]:
    """The error of the worst element, and what it is allowed."""
    bound = tolerance(case.op, case.variant, want.dtype)
    one = compare.elements("out", found, want, bound, case.id)
    return one.error, one.bound


def test_the_model_gives_what_an_h200_gave() -> None:
    error, bound = off(ROWS, made(ROWS, 0, BITS), expected(ROWS, 0))
    assert error == pytest.approx(8.4e-4, abs=0.05e-4)
    assert bound == pytest.approx(6.8e-4, abs=0.05e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(CASES))
def test_sums_that_are_cut_are_within_their_bound(name: str, seed: int) -> None:
    case = CASES[name]
    error, bound = off(case, made(case, seed, BITS), allowed(expected(case, seed), case))
    assert error <= bound


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_close(seed: int) -> None:
    """Sums of two bits fewer, and the strict bound for these, fail."""
    want = expected(ROWS, seed)
    error, bound = off(ROWS, made(ROWS, seed, BITS - 2), allowed(want, ROWS))
    assert error > bound
    error, bound = off(ROWS, made(ROWS, seed, BITS), want)
    assert error > bound


def test_nothing_else_is_allowed_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By case, and by device."""
    for case in cases_of("gemm"):
        if case.variant in ("fp8_block+fp8_block", "fp8_tensor+bf16", "fp8_block+fp8_tensor"):
            want = expected(case, 0)
            assert allowed(want, case) is want
    assert not cuts_sums(torch.device("cpu"))
    gpu = torch.device("cuda", 0)
    for capability, hip, cuts in (
        ((9, 0), None, True),
        ((10, 0), None, False),
        ((9, 5), "7", False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert cuts_sums(gpu) is cuts
