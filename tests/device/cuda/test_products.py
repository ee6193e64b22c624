"""Products in every weight format, as they are and with quantised activations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ml4core.api import Weight
from ml4core.formats import e2m1
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import cases_of
from ml4core_cuda.ffn_stage import ACTS

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

GEMMS = [
    case
    for case in cases_of("gemm")
    if case.name not in ("none", "slice", "wide") and case.options.get("act") in (None, *ACTS)
]
OTHERS = [
    case
    for case in (*cases_of("gemm"), *cases_of("head_gemm"))
    if case.variant in ("bf16+bf16", "fp32+fp32", "fp32+bf16") and case.name != "one"
]


@pytest.mark.parametrize("case", GEMMS, ids=lambda case: case.id)
def test_gemm(case: OpCase, judged: Callable[..., None]) -> None:
    from ml4core_cuda.kernels.gemm import gemm

    judged(gemm, case)


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.id)
def test_other_products(case: OpCase, judged: Callable[..., None]) -> None:
    from ml4core_cuda.kernels.gemm import gemm
    from ml4core_cuda.kernels.head_gemm import head_gemm

    judged(gemm if case.op == "gemm" else head_gemm, case)


def test_parts_of_a_long_sum_are_added_whatever_their_number(device: torch.device) -> None:
    """Few rows and columns: K is split, and its last part is shorter."""
    from ml4core_cuda.kernels.gemm import gemm, tiling

    assert tiling(4, 64, 1920, 1, 132).parts > 1
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (4, 1920), generator=draw).to(torch.bfloat16).to(device)
    data = torch.randint(-4, 5, (40, 1920), generator=draw).to(torch.bfloat16).to(device)
    found = gemm(x, Weight("bf16", (40, 1920), {"data": data}), torch.float32)
    assert torch.equal(found, x.float() @ data.float().T)


def test_rows_that_begin_at_odd_elements_meet_fp4_heads(device: torch.device) -> None:
    """Products with FP4 read two columns at a time."""
    from ml4core_cuda.kernels.head_gemm import head_gemm

    draw = torch.Generator().manual_seed(4)
    parts = {
        "data": torch.randint(0, 256, (2, 16, 16), generator=draw, dtype=torch.uint8),
        "scale": torch.randint(124, 130, (2, 16, 1), generator=draw, dtype=torch.uint8),
    }
    weight = Weight("mxfp4", (2, 16, 32), {name: part.to(device) for name, part in parts.items()})
    rows = torch.randn(3, 65, generator=draw).to(torch.bfloat16).to(device)
    heads = torch.randn(3, 2, 33, generator=draw).to(torch.bfloat16).to(device)
    for odd in (
        rows[:, :64].unflatten(1, (2, 32)),
        rows[:, 1:].unflatten(1, (2, 32)),
        heads[..., :32],
    ):
        assert torch.equal(head_gemm(odd, weight), head_gemm(odd.contiguous(), weight))


def test_a_product_of_one_row_has_a_program_for_each_multiprocessor() -> None:
    from ml4core_cuda.kernels.gemm import row_tiling

    for columns, inner in ((6144, 6144), (1536, 6144), (131072, 6144), (6144, 768)):
        assert -(-columns // row_tiling(columns, inner, 1, 132).columns) >= 132


def test_a_turn_of_one_row_divides_the_inner_axis_where_a_long_one_can() -> None:
    from ml4core_cuda.kernels.gemm import row_block

    found = {inner: row_block(inner) for inner in (6144, 1536, 768, 576, 128, 64)}
    assert found == {6144: 1024, 1536: 512, 768: 1024, 576: 1024, 128: 128, 64: 128}


def test_codes_of_fp4_become_bf16_by_shifts() -> None:
    """What the device's instructions do with a pair of codes, in integers."""
    code = torch.arange(16)
    low = (code * 0x1040) & 0x81C0
    high = ((code << 4) * 0x104) & 0x81C0
    assert torch.equal(low, high)
    value = low.to(torch.int32).to(torch.int16).view(torch.bfloat16).float() * 2.0**126
    assert torch.equal(value, e2m1.decode(code.to(torch.uint8)))
    assert torch.tensor([0x7E80], dtype=torch.int16).view(torch.bfloat16).item() == 2.0**126


@pytest.mark.parametrize(
    ("shape", "columns"), [((3, 4), 5), ((4,), 4)], ids=["inner axis", "one axis"]
)
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...], columns: int) -> None:
    from ml4core_cuda.kernels.gemm import gemm

    weight = Weight("bf16", (2, columns), {"data": torch.zeros(2, columns, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="gemm takes x"):
        gemm(torch.zeros(shape, dtype=torch.bfloat16), weight)


def test_an_unknown_activation_is_refused() -> None:
    from ml4core_cuda.kernels.gemm import gemm

    weight = Weight("bf16", (2, 4), {"data": torch.zeros(2, 4, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="not to 'int8'"):
        gemm(torch.zeros(1, 4, dtype=torch.bfloat16), weight, act="int8")
