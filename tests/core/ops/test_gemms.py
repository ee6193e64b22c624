"""Products with weights in every format, against float64 of the decoded weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.compose.ops import COMPOSED
from ml4core.compose.ops.weights import decode_weight
from ml4core.formats import fp8_block, fp8_tensor, mxfp4, nvfp4

from .references import e4m3_value
from .support import NAN, Check, Draw, assert_close, corner_cases

embed, gemm, head_gemm = COMPOSED["embed"], COMPOSED["gemm"], COMPOSED["head_gemm"]
silu_mul, quantize = COMPOSED["silu_mul"], COMPOSED["quantize"]

FORMATS = ("fp32", "bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4")
DTYPES = (torch.float32, torch.bfloat16)


def check_gemm(rows: int, format: str, dtype: torch.dtype, out: torch.dtype | None = None) -> None:
    """200 x 160: neither axis is a whole number of blocks of 128."""
    draw = Draw(1)
    weight = quantize(draw.normal(200, 160), format)
    x = draw.normal(rows, 160, dtype=dtype)
    got = gemm(x, weight, out)
    assert got.dtype == (out or dtype)
    values = decode_weight(weight).double()
    assert_close(got, x.double() @ values.T, x.double().abs() @ values.T.abs(), 160)


@pytest.mark.parametrize("out", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_gemm(format: str, dtype: torch.dtype, out: torch.dtype | None) -> None:
    check_gemm(5, format, dtype, out)


@pytest.mark.parametrize("format", FORMATS)
def test_gemm_in_tiles_of_the_weight(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ml4core.compose.ops.gemms.TEMP_BYTES", 128 * 160 * 4)
    check_gemm(3, format, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_head_gemm(format: str, dtype: torch.dtype) -> None:
    check_head_gemm(4, 3, format, dtype)


def check_head_gemm(rows: int, heads: int, format: str, dtype: torch.dtype) -> None:
    draw = Draw(2)
    weight = quantize(draw.normal(heads, 40, 96), format)
    x = draw.normal(rows, heads, 96, dtype=dtype)
    got = head_gemm(x, weight)
    assert got.dtype == dtype
    assert got.is_contiguous()
    values = decode_weight(weight).double()
    want = torch.stack([x[:, n].double() @ values[n].T for n in range(heads)], 1)
    size = torch.stack([x[:, n].double().abs() @ values[n].T.abs() for n in range(heads)], 1)
    assert_close(got, want, size, 96)


def test_decoding_a_stack_equals_decoding_its_matrices() -> None:
    stack = Draw(3).normal(3, 130, 160) * torch.tensor([1.0, 30.0, 0.01]).view(3, 1, 1)
    for format in FORMATS:
        whole = decode_weight(quantize(stack, format))
        for i in range(3):
            assert torch.equal(whole[i], decode_weight(quantize(stack[i], format))), format


def test_rows_of_nvfp4_keep_their_own_multiplier() -> None:
    weight = quantize(Draw(4).normal(4, 32), "nvfp4")
    factor = torch.tensor([1.0, 2.0, 1.0, 0.5])
    parts = dict(weight.parts) | {"global_scale": weight.parts["global_scale"] * factor}
    scaled = decode_weight(Weight("nvfp4", weight.shape, parts))
    assert torch.equal(scaled, decode_weight(weight) * factor[:, None])


def test_unknown_formats_are_named() -> None:
    with pytest.raises(ValueError, match="unknown weight format 'int3'; known: fp32, bf16"):
        quantize(torch.zeros(1, 32), "int3")
    with pytest.raises(ValueError, match="unknown weight format 'x-acme/packed'"):
        gemm(torch.zeros(1, 4), Weight("x-acme/packed", (4, 4), {"data": torch.zeros(4, 4)}))
    with pytest.raises(ValueError, match=r"unknown rule 'up' of format 'mxfp4'; known: even, "):
        quantize(torch.zeros(1, 32), "mxfp4", "up")
    with pytest.raises(ValueError, match="'nvfp4'; it has none"):
        quantize(torch.zeros(1, 32), "nvfp4", "even")


def parts_by_formats(x: Tensor, format: str) -> tuple[Tensor, ...]:
    """The bytes as the format's own module makes them, of one matrix."""
    if format == "fp8_block":
        return fp8_block.quantize_weight(x)
    if format == "fp8_tensor":
        return fp8_tensor.quantize(x)
    if format == "nvfp4":
        multiplier = nvfp4.global_multiplier(x)
        rows = multiplier.expand(x.shape[0])
        return (*nvfp4.quantize(x, multiplier=multiplier), rows)
    return mxfp4.quantize(x)


QUANTIZED = ("fp8_block", "fp8_tensor", "nvfp4", "mxfp4")


def check_quantize(x: Tensor) -> None:
    """The parts are those of the format, and their names, dtypes and shapes those of ``Weight``."""
    rows, columns = x.shape
    for format in QUANTIZED:
        weight = quantize(x, format)
        assert weight.shape == (rows, columns)
        wanted = parts_by_formats(x, format)
        assert tuple(weight.parts) == ("data", "scale", "global_scale")[: len(wanted)]
        for part, want in zip(weight.parts.values(), wanted, strict=True):
            assert part.dtype == want.dtype
            assert part.is_contiguous()
            assert torch.equal(part, want), format
    assert quantize(x, "fp8_tensor").parts["scale"].shape == ()
    assert quantize(x, "nvfp4").parts["global_scale"].shape == (rows,)
    for rule in mxfp4.RULES:
        data, scale = mxfp4.quantize(x, rule)
        weight = quantize(x, "mxfp4", rule)
        assert torch.equal(weight.parts["data"], data)
        assert torch.equal(weight.parts["scale"], scale)
    scale = quantize(x, "fp8_block", "pow2").parts["scale"]
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype: torch.dtype) -> None:
    check_quantize(Draw(5).normal(130, 160, dtype=dtype))


def zero_block() -> None:
    x = Draw(6).normal(4, 256)
    x[:, 128:] = 0
    check_quantize(x)
    for format in QUANTIZED:
        assert torch.equal(decode_weight(quantize(x, format))[:, 128:], torch.zeros(4, 128))


def quantize_ties() -> None:
    """Half way between two codes goes to the even one."""
    x = torch.zeros(1, 128)
    x[0, :6] = torch.tensor([448.0, 17.0, 19.0, -17.0, -19.0, 2.0**-10])
    got = decode_weight(quantize(x, "fp8_block"))[0, :6]
    assert got.tolist() == [448.0, 16.0, 20.0, -16.0, -20.0, 0.0]
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([6.0, 0.25, 0.75, 1.25, 2.5, 5.0])
    got = decode_weight(quantize(x, "mxfp4"))[0, :6]
    assert got.tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 4.0]


def max_block() -> None:
    largest = torch.finfo(torch.float32).max
    x = Draw(7).normal(2, 128).sign() * largest
    for format in ("fp8_block", "fp8_tensor"):
        torch.testing.assert_close(decode_weight(quantize(x, format)), x)
    x[0, 0], x[0, 1] = float("inf"), NAN
    data = quantize(x, "fp8_block").parts["data"]
    assert data[0, 0] == 0x7E
    assert data[0, 1] == 0x7F
    assert e4m3_value(0x7E, "e4m3fn") == 448


def sign_of_zero() -> None:
    x = torch.zeros(1, 128)
    x[0, 1::2] = -0.0
    assert quantize(x, "fp8_block").parts["data"][0, :4].tolist() == [0, 0x80, 0, 0x80]
    assert quantize(x, "mxfp4").parts["data"][0, :2].tolist() == [0x80, 0x80]


def check_embed(ids: list[int]) -> None:
    for dtype in DTYPES:
        table = Draw(8).normal(11, 6, dtype=dtype)
        got = embed(torch.tensor(ids), table)
        assert torch.equal(got, torch.stack([table[i] for i in ids]))
        got.zero_()
        assert table.count_nonzero() > 60  # the result was a copy


def check_silu_mul(gate_up: Tensor) -> None:
    got = silu_mul(gate_up)
    assert got.dtype == gate_up.dtype
    gate, up = gate_up.double().chunk(2, -1)
    want = gate * torch.sigmoid(gate) * up
    assert_close(got, want, want.abs() + 1e-37, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    check_silu_mul(Draw(9).normal(3, 34, dtype=dtype) * 4)


def large_negative_gate() -> None:
    for gate in (-20.0, -80.0, -500.0, -3e38):
        check_silu_mul(torch.tensor([[gate, 2.0]]))


def each_format(check: Callable[[str], None]) -> Check:
    def run() -> None:
        for format in FORMATS:
            check(format)

    return run


CORNERS: dict[str, dict[str, Check]] = {
    "embed": {
        "first and last id": lambda: check_embed([0, 10]),
        "repeated id": lambda: check_embed([3, 3, 0, 3]),
    },
    "gemm": {
        "one row": each_format(lambda f: check_gemm(1, f, torch.float32)),
        "ragged last block": each_format(lambda f: check_gemm(3, f, torch.float32)),
    },
    "head_gemm": {
        "one row": each_format(lambda f: check_head_gemm(1, 3, f, torch.float32)),
        "one head": each_format(lambda f: check_head_gemm(4, 1, f, torch.float32)),
    },
    "silu_mul": {"large negative gate": large_negative_gate},
    "quantize": {
        "zero block": zero_block,
        "ties": quantize_ties,
        "max block": max_block,
        "sign of zero": sign_of_zero,
    },
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
