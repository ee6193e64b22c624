"""E4M3 against its definition: every byte, every bfloat16, every halfway point."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml4core.formats import e4m3

FLAVOURS = ("e4m3fn", "e4m3fnuz")
flavours = pytest.mark.parametrize("flavour", FLAVOURS)


def all_bytes() -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8)


@flavours
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_decodes_exactly(exact, flavour, dtype):
    got = e4m3.decode(all_bytes(), flavour, dtype)
    assert got.dtype == dtype
    assert [exact.of(v) for v in got.tolist()] == exact.e4m3[flavour]


@flavours
def test_every_byte_survives_a_round_trip(flavour):
    code = all_bytes()
    back = e4m3.encode(e4m3.decode(code, flavour), flavour)
    expected = code.clone()
    if flavour == "e4m3fn":
        expected[0xFF] = 0x7F  # one NaN is written
    assert back.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("flavour", "expected"),
    [
        ("e4m3fn", [2.0**-6, 2.0, 448.0, math.nan, -0.0]),
        ("e4m3fnuz", [2.0**-7, 1.0, 224.0, 240.0, math.nan]),
    ],
)
def test_golden_bytes(flavour, expected):
    """B021: the same bytes are other numbers in the other flavour."""
    code = torch.tensor([0x08, 0x40, 0x7E, 0x7F, 0x80], dtype=torch.uint8)
    got = e4m3.decode(code, flavour)
    assert str(got.tolist()) == str(expected)


@pytest.mark.parametrize(
    ("flavour", "expected"),
    [
        ("e4m3fn", [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F]),
        ("e4m3fnuz", [0x7F, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F, 0xFF, 0x80, 0x80]),
    ],
)
def test_overflow_saturates_and_nan_stays(flavour, expected):
    """B023: finite and infinite values saturate, NaN of either sign is one byte."""
    nan = math.nan
    x = torch.tensor([448, 464, 465, 1000, -1000, math.inf, -math.inf, nan, -nan])
    x[-1] = torch.copysign(x[-1], torch.tensor(-1.0))
    assert e4m3.encode(x, flavour).tolist() == expected


@flavours
def test_every_bfloat16_encodes_exactly(exact, flavour):
    bits = torch.arange(1 << 16, dtype=torch.int32)
    x = bits.to(torch.int16).view(torch.bfloat16)
    got = e4m3.encode(x, flavour)
    assert got.dtype == torch.uint8
    expected = [exact.encode_e4m3(exact.value(b << 16), flavour) for b in range(1 << 16)]
    assert got.tolist() == expected
    assert e4m3.encode(x.float(), flavour).tolist() == expected


@flavours
def test_every_halfway_point_goes_to_even(exact, from_bits, flavour):
    values = sorted({v for v in exact.e4m3[flavour] if not isinstance(v, str) and v >= 0})
    patterns = []
    for low, high in pairwise(values):
        middle = exact.bits(float((low + high) / 2))
        assert exact.value(middle) == (low + high) / 2
        patterns += [middle - 1, middle, middle + 1]
    patterns += [p | 1 << 31 for p in patterns]
    got = e4m3.encode(from_bits(patterns), flavour).tolist()
    assert got == [exact.encode_e4m3(exact.value(p), flavour) for p in patterns]
    assert all(code % 2 == 0 for code in got[1::3])


@flavours
@given(patterns=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64))
def test_any_float32_encodes_exactly(exact, from_bits, flavour, patterns):
    got = e4m3.encode(from_bits(patterns), flavour).tolist()
    assert got == [exact.encode_e4m3(exact.value(p), flavour) for p in patterns]


def test_half_precision_encodes_exactly(exact):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    expected = [exact.encode_e4m3(exact.of(v), "e4m3fn") for v in x.tolist()]
    assert e4m3.encode(x, "e4m3fn").tolist() == expected


def test_zero_has_a_sign_in_fn_only():
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    assert e4m3.encode(x, "e4m3fn").tolist() == [0x00, 0x80, 0x00, 0x80]
    assert e4m3.encode(x, "e4m3fnuz").tolist() == [0, 0, 0, 0]


def test_shapes_and_strides_are_kept():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).t()
    code = e4m3.encode(x, "e4m3fn")
    assert code.shape == (4, 6)
    assert torch.equal(code, e4m3.encode(x.contiguous(), "e4m3fn"))
    assert torch.equal(e4m3.decode(code.t(), "e4m3fn"), e4m3.decode(code, "e4m3fn").t())
    assert e4m3.encode(torch.empty(0, 3), "e4m3fnuz").shape == (0, 3)


def test_fn_to_fnuz_keeps_the_values(exact):
    """The doubled scale makes up for halved values; NaN stays NaN, minus zero becomes zero."""
    converted = e4m3.fn_to_fnuz(all_bytes())
    assert converted.dtype == torch.uint8
    for byte, other in enumerate(converted.tolist()):
        before, after = exact.e4m3["e4m3fn"][byte], exact.e4m3["e4m3fnuz"][other]
        if before == "-0":
            assert after == 0
        elif before == "nan":
            assert after == "nan"
        else:
            assert 2 * after == before
            assert byte == other


def test_float8_tensors_are_read_if_the_flavour_agrees():
    x = torch.tensor([1.5, -2.0])
    assert e4m3.decode(x.to(torch.float8_e4m3fn), "e4m3fn").tolist() == [1.5, -2.0]
    with pytest.raises(TypeError, match=r"e4m3fnuz decodes .*float8_e4m3fnuz, got .*float8_e4m3fn"):
        e4m3.decode(x.to(torch.float8_e4m3fn), "e4m3fnuz")


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="unknown E4M3 flavour 'e5m2'; known: e4m3fn, e4m3fnuz"):
        e4m3.encode(torch.zeros(1), "e5m2")
    with pytest.raises(TypeError, match="float64"):
        e4m3.encode(torch.zeros(1, dtype=torch.float64), "e4m3fn")
