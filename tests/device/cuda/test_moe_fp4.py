"""Routed experts in FP4 by ``moe_fp4``: each row by itself, and the rows of an expert together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

EXPERTS = 3
SMALL, LARGE = (256, 128), (1152, 640)
"""Widths of the model and of an expert. The larger ones are those that ``fp4_experts`` takes, with
a last step that isn't whole.
"""
SIZES = [
    pytest.param(SMALL, id="small"),
    pytest.param(LARGE, id="large", marks=pytest.mark.accelerator),
]


def _weights(format: str, sizes: tuple[int, int], device: torch.device) -> tuple[Weight, Weight]:
    from ml4core_cuda.measure.work import Draw

    draw, (width, inner) = Draw(3, device), sizes
    shapes = ((EXPERTS, 2 * inner, width), (EXPERTS, width, inner))
    first, second = (draw.weight(format, *shape) for shape in shapes)
    return first, second


def _matrix(stack: Weight, expert: int) -> Tensor:
    from ml4core_cuda.measure.decoding import decoded

    parts = {name: part[expert] for name, part in stack.parts.items()}
    return decoded(Weight(stack.format, stack.shape[1:], parts)).double()


def _wanted(x: Tensor, w13: Weight, w2: Weight, weights: Tensor, ids: Tensor) -> Tensor:
    first, second = ([_matrix(w, e) for e in range(EXPERTS)] for w in (w13, w2))
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t, j in ((t, j) for t in range(len(x)) for j in range(ids.shape[1])):
        if 0 <= ids[t, j] < EXPERTS and weights[t, j] != 0:
            gate, up = (first[ids[t, j]] @ x[t].double()).chunk(2)
            out[t] += weights[t, j] * (second[ids[t, j]] @ (torch.nn.functional.silu(gate) * up))
    return out


def _both(x: Tensor, w13: Weight, w2: Weight, weights: Tensor, ids: Tensor) -> list[Tensor]:
    from ml4core_cuda.kernels import moe_fp4
    from ml4core_triton.kernels.sums import combine
    from ml4core_triton.kernels.weights import weight_args

    inner, outer = weight_args(w13), weight_args(w2)
    assert moe_fp4.serves(x, inner, outer)
    found = [torch.empty_like(x), torch.empty_like(x)]
    moe_fp4.rows_apart(x, inner, outer, None, weights, ids, 0, found[0])
    each = moe_fp4.each_choice(x, inner, outer, None, weights, ids, 0)
    combine(each, weights, ids, found[1], 0, EXPERTS)
    return found


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_rows_apart_and_together_are_the_sum_of_their_experts(
    format: str, sizes: tuple[int, int], device: torch.device
) -> None:
    w13, w2 = _weights(format, sizes, device)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, sizes[0], generator=draw).to(device, torch.bfloat16)
    ids = torch.tensor([[0, 2], [EXPERTS, 0], [0, 1]], device=device)  # one is another rank's
    weights = torch.tensor([[0.5, 1.5], [1.0, 2.0], [0.7, 0.0]], device=device)
    wanted = _wanted(x, w13, w2, weights, ids)
    for found in _both(x, w13, w2, weights, ids):
        assert (found.double() - wanted).abs().max() < 6e-3 * wanted.abs().max()


@pytest.mark.parametrize(
    "byte", [0, 132, 133, 255, *(pytest.param(b, marks=pytest.mark.slow) for b in (100, 150))]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_scales_of_mxfp4_are_exact_however_large(
    sizes: tuple[int, int], byte: int, device: torch.device
) -> None:
    w13, w2 = _weights("mxfp4", sizes, device)
    w13.parts["scale"][0].fill_(byte)
    size = 2.0 ** (127 - byte)  # so that sums are of about one
    x = torch.zeros(1, sizes[0], dtype=torch.bfloat16, device=device)
    x[0, [0, 77, 255]] = torch.tensor([1.0, -1.5, 0.5], dtype=torch.bfloat16, device=device)
    x *= size if byte < 255 else 1.0
    ids = torch.tensor([[0, 1]], device=device)
    weights = torch.tensor([[1.0, 0.0]], device=device)
    for found in _both(x, w13, w2, weights, ids):
        if byte == 255:
            assert found.isnan().all()
        else:
            wanted = _wanted(x, w13, w2, weights, ids)
            assert (found.double() - wanted).abs().max() <= 6e-3 * wanted.abs().max()
            assert wanted.abs().max() > 0


@pytest.mark.accelerator
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_eight_rows_of_an_expert_and_more(format: str, device: torch.device) -> None:
    w13, w2 = _weights(format, LARGE, device)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(19, LARGE[0], generator=draw).to(device, torch.bfloat16)
    ids = torch.zeros(19, 1, dtype=torch.int64, device=device)
    ids[17:] = 2
    weights = torch.ones(19, 1, device=device)
    wanted = _wanted(x, w13, w2, weights, ids)
    for found in _both(x, w13, w2, weights, ids):
        assert (found.double() - wanted).abs().max() < 6e-3 * wanted.abs().max()


def test_a_product_of_few_programs_has_more_warps() -> None:
    from ml4core_cuda.kernels.moe_fp4 import codes_tiling

    one, few = codes_tiling(12288, 6144, 4, 132), codes_tiling(6144, 6144, 1, 132)
    assert (one.columns, one.warps, one.registers) == (32, 4, 0)
    assert (few.columns, few.warps, few.registers) == (16, 8, 80)
