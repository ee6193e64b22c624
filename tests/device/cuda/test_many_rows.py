"""Products of many rows with weights in blocks of FP8, and of experts with many rows each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

ROWS = 70


def _weight(draw: torch.Generator, *shape: int) -> Weight:
    *stack, rows, columns = shape
    data = torch.randint(24, 64, shape, generator=draw, dtype=torch.uint8)
    data |= torch.randint(0, 2, shape, generator=draw, dtype=torch.uint8) << 7
    scale = torch.rand(*stack, rows // 128, columns // 128, generator=draw) / columns**0.5 + 0.01
    return Weight("fp8_block", shape, {"data": data, "scale": scale})


def _on(weight: Weight, device: torch.device) -> Weight:
    parts = {name: part.to(device) for name, part in weight.parts.items()}
    return Weight(weight.format, weight.shape, parts)


def _numbers(weight: Weight) -> Tensor:
    codes = weight.data.view(torch.float8_e4m3fn).double()
    scale = weight.parts["scale"].double()
    return codes * scale.repeat_interleave(128, -2).repeat_interleave(128, -1)


def _quantized(x: Tensor) -> Tensor:
    from ml4core_cuda.kernels.activations import quantized

    found = quantized(x, "fp8_block")
    codes = found.data.view(torch.float8_e4m3fn).double()
    return codes * found.scale.double().repeat_interleave(128, -1)[:, : x.shape[1]]


@pytest.mark.parametrize("act", [None, "fp8_block"])
def test_a_product_of_many_rows(
    act: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ml4core_cuda.kernels import many_rows
    from ml4core_cuda.kernels.gemm import gemm
    from ml4core_triton.kernels.weights import weight_args

    monkeypatch.setattr(many_rows, "LEAST", ROWS // 2)
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 256, generator=draw).bfloat16().to(device)
    weight = _on(_weight(draw, 384, 256), device)
    kind = 0 if act is None else 1
    assert many_rows.serves(kind, x.dtype, weight_args(weight), ROWS)
    found = gemm(x, weight, torch.float32, act=act).double()
    want = (x.double() if act is None else _quantized(x)) @ _numbers(weight).T
    allowed = 1e-6 if device.type == "cpu" else 3e-4  # FP8 units keep 13 bits of a block's sum
    assert (found - want).norm() < allowed * want.norm()


def test_experts_of_many_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as by the kernels of few rows, ragged tiles and choices of other ranks included."""
    from ml4core_cuda.kernels import many_experts
    from ml4core_cuda.kernels.moe_experts import moe_experts

    draw = torch.Generator().manual_seed(6)
    experts = 3
    w13, w2 = _weight(draw, experts, 2 * 128, 256), _weight(draw, experts, 256, 128)
    x = torch.randn(ROWS, 256, generator=draw).bfloat16()
    ids = torch.rand(ROWS, 4, generator=draw).topk(2)[1]  # the last is of another rank
    weights = torch.rand(ROWS, 2, generator=draw)
    weights[3] = 0.0
    given = [one.to(device) for one in (weights, ids)]
    call = [x.to(device), _on(w13, device), _on(w2, device), *given]
    seen = []
    for least in (1, 1 << 30):
        monkeypatch.setattr(many_experts, "LEAST", least)
        seen.append(moe_experts(*call, act="fp8_block").double())
    assert seen[1].norm() > 0
    assert (seen[0] - seen[1]).norm() < 1e-2 * seen[1].norm()
    assert not seen[0][3].any()
