"""Norms, rotations, scales, tables and quantisers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import cases_of
from ml4core_triton.ops import load

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

OPS = (
    "rms_norm",
    "layer_norm",
    "all_reduce_rms_norm",
    "rope",
    "ssmax",
    "silu_mul",
    "embed",
    "quantize",
)
SLOW = {("nvfp4", "edges"), ("nvfp4", "stack")}
CASES = [
    case
    for op in OPS
    for case in cases_of(op)
    if (case.variant.partition("+")[0], case.name) not in SLOW or case.variant == "nvfp4+bf16"
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_op(case: OpCase, judged: Callable[..., None]) -> None:
    op = load(case.op, "ml4core_cuda")
    judged(op, case)


def test_angles_are_exact_far_out(device: torch.device) -> None:
    """All frequencies at positions to 2**20: cos and sin to an ulp and a half."""
    from ml4core_triton.kernels.rope import rope

    positions = torch.tensor([0, 1, 8191, 123456, 777777, (1 << 20) - 1, 1 << 20])
    frequency = (10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)).float() * 1.0317
    x = torch.zeros(len(positions), 1, 64)
    x[..., 0::2] = 1
    found = rope(x.to(device), positions.to(device), frequency.to(device), True, 1.0).cpu()
    angle = positions.double().unsqueeze(-1) * frequency.double()
    wanted = torch.stack((torch.cos(angle), torch.sin(angle)), -1).flatten(-2)
    assert float((found[:, 0].double() - wanted).abs().max()) < 1.5 * 2.0**-23


def test_bytes_of_e4m3_are_those_of_the_format(device: torch.device) -> None:
    """Every value, every tie between two, and what lies about them."""
    from ml4core.formats import e4m3
    from ml4core_triton.kernels.quantize import quantize

    values = e4m3.decode(torch.arange(0x7F, dtype=torch.uint8), "e4m3fn")
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat((values, ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20)))
    x = torch.cat((near, -near, torch.tensor([-0.0, 1e-8, -1e-8])))
    x = torch.nn.functional.pad(x, (0, -len(x) % 128), value=448.0).reshape(-1, 128)
    found = quantize(x.to(device), "fp8_block")
    assert bool((found.parts["scale"] == 1).all())
    assert torch.equal(found.data.cpu(), e4m3.encode(x, "e4m3fn"))
