"""Products and experts on the suite's own cases, and activations byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ml4core.api import Weight
from ml4core.formats import e4m3, e8m0, fp8_block, mxfp4
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import cases_of
from ml4core_triton.ops import load

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

LARGE = {("moe_experts", "rows")}
"""Cases of many rows, which take the interpreter ten seconds and more each."""

CASES = [
    pytest.param(
        case, id=case.id, marks=[pytest.mark.slow] if (case.op, case.name) in LARGE else []
    )
    for op in ("gemm", "head_gemm", "moe_experts")
    for case in cases_of(op)
    if case.small and "act:nvfp4" not in case.requires  # no kernel here quantises to that
]


@pytest.mark.parametrize("case", CASES)
def test_op(case: OpCase, judged: Callable[[Callable[..., Any], OpCase], None]) -> None:
    judged(load(case.op, "ml4core_rocm"), case)


@pytest.fixture
def rows() -> torch.Tensor:
    """[6, 160] with groups of zeros, of ties, of denormals, and what isn't finite."""
    x = torch.randn(6, 160, generator=torch.Generator().manual_seed(0))
    x[1, :32] = 0
    x[2, :7] = torch.tensor([7.0, 6.5, 5.0, 2.5, 1.75, 0.25, -0.75])
    x[2, 7:32] = 0
    x[3] *= 1e-39
    x[4, 3], x[4, 40] = float("inf"), float("nan")
    x[5] *= 3e37
    return x


def test_mxfp4_activations_are_the_formats_bytes(device: torch.device, rows: torch.Tensor) -> None:
    from ml4core_rocm.kernels.activations import group_values, quantized

    found = quantized(rows.to(device), "mxfp4")
    data, scale = mxfp4.quantize(rows)
    assert torch.equal(found.data.cpu(), data)
    assert torch.equal(found.scale.cpu(), scale)
    values = group_values(rows.to(device), "mxfp4").cpu()
    assert torch.equal(values, mxfp4.dequantize(data, scale))
    narrow = rows.bfloat16()
    data, scale = mxfp4.quantize(narrow)
    values = group_values(narrow.to(device), "mxfp4").cpu()
    assert torch.equal(values.float(), mxfp4.dequantize(data, scale))


def test_mxfp8_activations_never_saturate(device: torch.device, rows: torch.Tensor) -> None:
    from ml4core_rocm.kernels.activations import quantized

    rows = rows.nan_to_num(0.0, 1.0, -1.0)
    found = quantized(rows.to(device), "mxfp8")
    groups = rows.view(6, 5, 32)
    unit = e8m0.decode(found.scale.cpu())
    amax = groups.abs().amax(-1)
    assert bool((amax.double() <= 448.0 * unit.double()).all())
    # The least power of two that does: half of it would saturate, unless it is the least there is.
    least = found.scale.cpu() == 0
    assert bool(((amax.double() > 224.0 * unit.double()) | least).all())
    want = e4m3.encode((groups / unit.unsqueeze(-1)).flatten(1), "e4m3fn")
    firm = ~least.repeat_interleave(32, 1)
    assert torch.equal(found.data.cpu()[firm], want[firm])


def test_block_activations_are_the_formats_bytes(device: torch.device, rows: torch.Tensor) -> None:
    from ml4core_rocm.kernels.activations import quantized

    codes, scale = fp8_block.quantize_activation(rows, "e4m3fn")
    found = quantized(rows.to(device), "fp8_block")
    assert torch.equal(found.data.cpu(), codes)
    assert torch.equal(found.scale.cpu(), scale)
    with pytest.raises(ValueError, match="'int8'"):
        quantized(rows, "int8")
    with pytest.raises(ValueError, match="rows of 40"):
        quantized(rows[:, :40], "mxfp4")


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("act", ["mxfp4", "mxfp8"])
def test_scales_in_the_units_are_scales_before_them(
    device: torch.device, act: str, arch: str
) -> None:
    """a4w4 and a8w4: where matrix units take scales, and where codes are decoded first."""
    from ml4core_rocm.kernels.activations import group_values
    from ml4core_rocm.kernels.gemm import gemm
    from ml4core_rocm.kernels.target import ahead

    random = torch.Generator().manual_seed(2)
    data, scale = mxfp4.quantize(torch.randn(80, 416, generator=random))
    weight = Weight("mxfp4", (80, 416), {"data": data.to(device), "scale": scale.to(device)})
    x = torch.randn(5, 416, generator=random)
    values = group_values(x.to(device), act).cpu().double()
    want = values @ mxfp4.dequantize(data, scale).double().T
    with ahead(arch):
        found = gemm(x.to(device), weight, act=act).cpu()
    assert float((found.double() - want).norm() / want.norm()) < 1e-6
    plain = x.double() @ mxfp4.dequantize(data, scale).double().T
    assert float((found.double() - plain).norm() / plain.norm()) > 0.01


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("act", ["mxfp4", "mxfp8"])
def test_experts_with_scales_in_the_units(device: torch.device, act: str, arch: str) -> None:
    """a4w4 and a8w4, both products: inputs are quantised, and so is what lies between."""
    from ml4core_rocm.kernels.activations import group_values
    from ml4core_rocm.kernels.moe_experts import moe_experts
    from ml4core_rocm.kernels.target import ahead

    random = torch.Generator().manual_seed(4)

    def matrix(*shape: int) -> tuple[Weight, torch.Tensor]:
        data, scale = mxfp4.quantize(torch.randn(shape, generator=random))
        parts = {"data": data.to(device), "scale": scale.to(device)}
        return Weight("mxfp4", shape, parts), mxfp4.dequantize(data, scale).double()

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return group_values(values.float().to(device), act).cpu().double()

    (w13, first), (w2, second) = matrix(3, 2 * 96, 160), matrix(3, 160, 96)
    x = torch.randn(5, 160, generator=random)
    ids = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1], [2, 0]])
    weights = torch.rand(5, 2, generator=random)
    with ahead(arch):
        given = (x.to(device), w13, w2, weights.to(device), ids.to(device))
        found = moe_experts(*given, act=act).cpu().double()

    def experts(quantise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        both = torch.einsum("th,tkih->tki", quantise(x), first[ids])
        gate, up = both.split(96, dim=-1)
        inner = quantise((torch.nn.functional.silu(gate) * up).flatten(0, 1)).view(5, 2, 96)
        return torch.einsum("tki,tkhi,tk->th", inner, second[ids], weights.double())

    want, plain = experts(rounded), experts(torch.Tensor.double)
    # Few sums, in fp32 here and fp64 there, stand on either side of a tie.
    assert float((found - want).norm() / want.norm()) < 2e-3
    assert float((found - plain).norm() / plain.norm()) > 0.01
