"""E8M0 and the power-of-two rules, against fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml4core.formats import ceil_pow2, e8m0
from ml4core.formats.exponent import ceil_exponent

MAX_FINITE = 0x7F7FFFFF
positive_bits = st.lists(st.integers(1, MAX_FINITE), min_size=1, max_size=64)
normal_bits = st.lists(st.integers(0x00800000, MAX_FINITE), min_size=1, max_size=64)


def corner_bits() -> list[int]:
    """Around each power of two and each quarter between, denormals included."""
    corners = {1, 2, 3, 4, 5, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF}
    for exponent in range(1, 255):
        for fraction in (0x000000, 0x200000, 0x400000, 0x600000):
            middle = exponent << 23 | fraction
            corners |= {middle - 1, middle, middle + 1}
    corners |= {1 << n for n in range(23)} | {(1 << n) + 1 for n in range(23)}
    return sorted(corners)


def test_every_e8m0_byte(exact):
    got = e8m0.decode(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert got.dtype == torch.float32
    expected = [Fraction(2) ** (byte - 127) for byte in range(255)]
    assert [exact.of(v) for v in got.tolist()] == [*expected, "nan"]


def test_every_e8m0_byte_survives_a_round_trip():
    code = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(e8m0.encode(e8m0.decode(code)), code)


def test_e8m0_exponents_are_clamped():
    exponent = torch.tensor([-1000, -128, -127, -126, 0, 127, 128, 1000], dtype=torch.int32)
    assert e8m0.from_exponent(exponent).tolist() == [0, 0, 0, 1, 127, 254, 254, 254]
    assert e8m0.pow2(exponent).tolist() == [
        2.0 ** max(-127, min(127, e)) for e in exponent.tolist()
    ]


def test_e8m0_of_what_is_no_power_of_two(from_bits):
    x = torch.tensor([0.0, -0.0, 1.0, 1.0000001, 3.0, math.inf, math.nan, -1.0, 2.0**127 * 1.5])
    assert e8m0.encode(x).tolist() == [0, 0, 127, 128, 129, 254, 255, 255, 254]
    denormals = from_bits([1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF, 0x800000, 0x800001])
    assert e8m0.encode(denormals).tolist() == [0, 0, 0, 1, 1, 1, 2]


def check_ceil_pow2(exact, from_bits, patterns):
    got = ceil_pow2(from_bits(patterns))
    for pattern, value in zip(patterns, got.tolist(), strict=True):
        exponent = max(exact.least_exponent(exact.value(pattern), Fraction(1)), -149)
        expected = Fraction(2) ** exponent if exponent <= 127 else "inf"
        assert exact.of(value) == expected, hex(pattern)


def test_ceil_pow2_at_the_corners(exact, from_bits):
    check_ceil_pow2(exact, from_bits, corner_bits())


@given(patterns=positive_bits)
def test_ceil_pow2_anywhere(exact, from_bits, patterns):
    check_ceil_pow2(exact, from_bits, patterns)


def test_ceil_pow2_of_the_rest():
    got = ceil_pow2(torch.tensor([0.0, -0.0, math.inf, math.nan, -1.0, -math.inf]))
    assert str(got.tolist()) == str([0.0, 0.0, math.inf, math.nan, math.nan, math.nan])
    assert ceil_pow2(torch.tensor([3.0], dtype=torch.bfloat16)).tolist() == [4.0]


def check_ceil_exponent(exact, from_bits, patterns, limit):
    got = ceil_exponent(from_bits(patterns), limit)
    assert got.dtype == torch.int32
    expected = [exact.least_exponent(exact.value(p), Fraction(limit)) for p in patterns]
    assert got.tolist() == expected


limits = pytest.mark.parametrize("limit", [1.0, 4.0, 6.0, 224.0, 240.0, 448.0, 1.0000001192092896])


@limits
def test_ceil_exponent_at_the_corners(exact, from_bits, limit):
    normal = [p for p in corner_bits() if p >= 0x800000]
    check_ceil_exponent(exact, from_bits, normal, limit)


@limits
@given(patterns=normal_bits)
def test_ceil_exponent_anywhere(exact, from_bits, limit, patterns):
    check_ceil_exponent(exact, from_bits, patterns, limit)


@limits
def test_ceil_exponent_of_denormals_is_never_too_small(exact, from_bits, limit):
    patterns = [p for p in corner_bits() if p < 0x800000] + [0]
    for p, e in zip(patterns, ceil_exponent(from_bits(patterns), limit).tolist(), strict=True):
        assert exact.value(p) <= Fraction(limit) * Fraction(2) ** e


@pytest.mark.parametrize("limit", [224.0, 448.0])
def test_ceil_exponent_equals_dividing_first(limit):
    """`2**ceil(log2(amax / limit))` with the quotient rounded to float32 is the same number."""
    amax = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)
    divided = ceil_pow2(amax / torch.tensor(limit))
    assert torch.equal(divided, e8m0.pow2(ceil_exponent(amax, limit)))


def test_a_limit_that_is_no_float32_is_refused():
    with pytest.raises(ValueError, match=r"limit 0\.1 is not a float32"):
        ceil_exponent(torch.ones(1), 0.1)
