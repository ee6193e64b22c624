"""The four scale rules of MXFP4, and its bytes, against fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml4core.formats import e2m1, e8m0, mxfp4

RULES = ("floor", "even", "roundup", "ceil")
rules = pytest.mark.parametrize("rule", RULES)


def exponent_by(exact, rule: str, amax: Fraction) -> int:
    """The rule as it is written down, then clamped."""
    if amax == 0:
        return -127
    floor = exact.floor_log2(amax)
    exponent = {
        "floor": floor - 2,
        "even": floor - 2 + (amax >= Fraction(7, 4) * Fraction(2) ** floor),
        "roundup": exact.least_exponent(amax, Fraction(6)),
        "ceil": exact.least_exponent(amax, Fraction(4)),
    }[rule]
    return max(-127, min(127, exponent))


def judge_group(exact, group: list[float], rule: str) -> tuple[int, list[int]]:
    """Scale byte and codes of one group of 32."""
    values = [exact.of(v) for v in group]
    amax = max((abs(v) for v in values if not isinstance(v, str)), default=Fraction(0))
    exponent = exponent_by(exact, rule, amax)
    scaled = [v if isinstance(v, str) else v / Fraction(2) ** exponent for v in values]
    return exponent + 127, [exact.encode_e2m1(v) for v in scaled]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("floor", [-2, -2, -2, -1, 0, 0, 0, 0]),
        ("even", [-2, -2, -1, -1, 0, 0, 0, 1]),
        ("roundup", [-2, -1, -1, -1, 0, 0, 1, 1]),
        ("ceil", [-1, -1, -1, 0, 0, 1, 1, 1]),
    ],
)
def test_golden_exponents(rule, expected):
    amax = torch.tensor([1.5, 1.74, 1.75, 3.0, 4.0, 6.0, 6.01, 7.0])
    assert mxfp4.scale_exponent(amax, rule).tolist() == expected
    assert mxfp4.scale_exponent(amax * 2.0**-60, rule).tolist() == [e - 60 for e in expected]


@pytest.mark.parametrize(
    ("rule", "byte", "value"),
    [("floor", 127, 6.0), ("even", 128, 8.0), ("roundup", 128, 8.0), ("ceil", 128, 8.0)],
)
def test_a_group_with_largest_seven(rule, byte, value):
    """B038: by floor 7 is clipped to 6, by the others 7 / 2 = 3.5 is a tie that becomes 4."""
    x = torch.zeros(1, 32)
    x[0, 5] = 7.0
    packed, scale = mxfp4.quantize(x, rule)
    assert scale.tolist() == [[byte]]
    assert mxfp4.dequantize(packed, scale)[0, 5].item() == value


@rules
def test_sweep_of_group_maxima(exact, rule):
    """B038: every maximum from 4 to 8 in steps of 1/16, beside small values and both signs."""
    maxima = [4.0 + n / 16 for n in range(65)]
    x = torch.linspace(-1.9, 1.9, 32).repeat(len(maxima), 1)
    x[:, 9] = torch.tensor(maxima)
    x[1::2, 9] *= -1
    packed, scale = mxfp4.quantize(x, rule)
    codes = e2m1.unpack(packed)
    clipped = 0
    for row, amax in enumerate(maxima):
        byte, expected = judge_group(exact, x[row].tolist(), rule)
        assert scale[row].tolist() == [byte]
        assert codes[row].tolist() == expected
        clipped += amax > 6 * 2.0 ** (byte - 127)
    # Above 6 up to 8, above 6 up to 7, never, never.
    assert clipped == {"floor": 31, "even": 15, "roundup": 0, "ceil": 0}[rule]


@rules
@given(
    bits=st.lists(st.integers(0, (1 << 32) - 1), min_size=32, max_size=32),
    spread=st.integers(0, 255),
)
def test_any_group(exact, from_bits, rule, bits, spread):
    # Exponents near each other, so that not all but the largest become zero.
    near = [b & 0x80FFFFFF | (max(spread - (b >> 24 & 3), 0) << 23) for b in bits]
    for patterns in (bits, near):
        x = from_bits(patterns)
        byte, expected = judge_group(exact, x.tolist(), rule)
        packed, scale = mxfp4.quantize(x, rule)
        assert scale.tolist() == [byte]
        assert e2m1.unpack(packed).tolist() == expected


@rules
@pytest.mark.parametrize("exponent", [1, 100, 127, 200, 254])
def test_exponents_where_each_rule_turns(exact, from_bits, rule, exponent):
    """The float32 at, before and after each fraction where some rule goes up by one."""
    patterns = []
    for fraction in (0x000000, 0x200000, 0x400000, 0x600000):
        middle = exponent << 23 | fraction
        patterns += [middle - 1, middle, middle + 1]
    got = mxfp4.scale_exponent(from_bits(patterns), rule).tolist()
    assert got == [exponent_by(exact, rule, exact.value(p)) for p in patterns]


@rules
def test_exponents_at_both_ends(exact, from_bits, rule):
    patterns = [0, 1, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x1000000, 0x17FFFFF, 0x7F000000, 0x7F7FFFFF]
    got = mxfp4.scale_exponent(from_bits(patterns), rule).tolist()
    assert got == [exponent_by(exact, rule, exact.value(p)) for p in patterns]


@rules
def test_dequantised_values_are_code_times_scale(exact, rule):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 4, 96, generator=generator) * 100
    packed, scale = mxfp4.quantize(x, rule)
    assert packed.dtype == scale.dtype == torch.uint8
    assert packed.shape == (3, 4, 48)
    assert scale.shape == (3, 4, 3)
    back = mxfp4.dequantize(packed, scale)
    codes = e2m1.unpack(packed)
    for position in ((0, 0, 0), (2, 3, 95), (1, 2, 31), (1, 2, 32)):
        byte = scale[position[0], position[1], position[2] // 32].item()
        expected = exact.decode_e2m1(codes[position].item()) * Fraction(2) ** (byte - 127)
        assert exact.of(back[position].item()) in (expected, "-0")
    again = mxfp4.quantize(back, rule)
    assert torch.equal(mxfp4.dequantize(*again), back)
    assert torch.equal(mxfp4.dequantize(packed, scale, torch.bfloat16).float(), back)


def test_every_scale_byte():
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8).unsqueeze(1)
    packed = torch.full((256, 16), 0x22, dtype=torch.uint8)
    got = mxfp4.dequantize(packed, scale)
    assert torch.equal(got[:255, 0], e8m0.decode(scale[:255, 0]))
    assert got[255].isnan().all()


@rules
def test_a_group_of_zeros(rule):
    packed, scale = mxfp4.quantize(torch.zeros(2, 64), rule)
    assert (packed == 0).all()
    assert (scale == 0).all()
    assert (mxfp4.dequantize(packed, scale) == 0).all()
    signed, _ = mxfp4.quantize(torch.full((1, 32), -0.0), rule)
    assert (signed == 0x88).all()


@rules
def test_what_is_not_finite_does_not_count_for_the_scale(rule):
    x = torch.full((1, 32), 3.0)
    clean = mxfp4.quantize(x, rule)[1]
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    packed, scale = mxfp4.quantize(x, rule)
    assert torch.equal(scale, clean)
    assert e2m1.unpack(packed)[0, :3].tolist() == [7, 15, 7]
    assert (mxfp4.dequantize(packed, scale)[0, 3:] == 3.0).all()


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="the last axis is 40, not a multiple of 32; pad it to 64"):
        mxfp4.quantize(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="unknown MXFP4 scale rule 'up'; known: floor, even"):
        mxfp4.quantize(torch.zeros(2, 32), "up")
    with pytest.raises(ValueError, match="rows of 32 bytes need 2 scales, got 4"):
        mxfp4.dequantize(
            torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.uint8)
        )
