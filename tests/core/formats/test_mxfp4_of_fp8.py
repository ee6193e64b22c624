"""FP8 in blocks to MXFP4 in one step gives the bytes of the way through bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ml4core.formats import fp8_block, mxfp4, mxfp4_fp8

RULES = tuple(mxfp4.RULES)


def by_bfloat16(code: Tensor, scale: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    values = fp8_block.dequantize_weight(code, scale, dtype=torch.bfloat16)
    return mxfp4.quantize(values, rule)


def judge(code: Tensor, scale: Tensor, rule: str) -> None:
    found, wanted = mxfp4_fp8.requantize(code, scale, rule), by_bfloat16(code, scale, rule)
    assert torch.equal(found[1], wanted[1]), "scales"
    assert torch.equal(found[0], wanted[0]), "codes"


def any_codes(seed: int, rows: int, columns: int, spread: int) -> Tensor:
    """All codes but NaN. ``spread`` bounds a group's magnitudes, so that small groups come too."""
    draw = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 0x7F, (rows, columns), generator=draw)
    top = torch.randint(0, 0x7F, (rows, columns // 32), generator=draw)
    top = torch.where(top % 5 == 0, top % spread, top).repeat_interleave(32, 1)
    sign = torch.randint(0, 2, (rows, columns), generator=draw) << 7
    return (torch.minimum(code, top) | sign).to(torch.uint8)


@given(
    seed=st.integers(0, 2**31),
    rows=st.sampled_from([1, 3, 127, 128, 129, 300]),
    columns=st.sampled_from([32, 96, 128, 160, 416]),
    exponent=st.integers(-140, 110),
    rule=st.sampled_from(RULES),
)
def test_every_code_at_any_scale(
    seed: int, rows: int, columns: int, exponent: int, rule: str
) -> None:
    draw = torch.Generator().manual_seed(seed)
    shape = fp8_block.scale_shape(rows, columns)
    mantissa = 1 + torch.rand(shape, generator=draw, dtype=torch.float64)
    spread = torch.randint(-4, 5, shape, generator=draw)
    scale = torch.ldexp(mantissa, exponent + spread).to(torch.float32)
    judge(any_codes(seed, rows, columns, 1 + seed % 16), scale, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-126, 1.0, 0.02, 2.0**118])
def test_extreme_scales(scale: float, rule: str) -> None:
    judge(any_codes(3, 256, 256, 4), torch.full((2, 2), scale), rule)


@pytest.mark.parametrize("rule", RULES)
def test_products_that_lie_between_two_bfloat16(rule: str) -> None:
    """A scale that is no power of two makes the step through bfloat16 inexact: at ties of E2M1 it
    decides, and both ways decide alike.
    """
    ties = 0
    for number in range(60):
        scale = torch.full((1, 1), (1 + number / 61.0) / 448)
        code = any_codes(number, 128, 128, 8)
        judge(code, scale, rule)
        direct = mxfp4.quantize(fp8_block.dequantize_weight(code, scale), rule)[0]
        ties += int((direct != mxfp4_fp8.requantize(code, scale, rule)[0]).sum())
    assert ties > 0  # else no case tells the two ways apart


def test_strips_follow_the_blocks_of_scales() -> None:
    code, columns = any_codes(5, 1400, 2080, 8), 2080
    scale = torch.rand(fp8_block.scale_shape(1400, columns)) + 1e-3
    judge(code, scale, "even")


def test_out_is_written_and_strided_input_is_read() -> None:
    wide = any_codes(6, 128, 512, 8)
    code, scale = wide[:, 128:384], torch.rand(1, 2) + 0.1
    out = torch.full((128, 128), 0xEE, dtype=torch.uint8), torch.full((128, 8), 0xEE).byte()
    found = mxfp4_fp8.requantize(code, scale, "even", out)
    assert found[0] is out[0]
    for part, wanted in zip(out, by_bfloat16(code, scale, "even"), strict=True):
        assert torch.equal(part, wanted)


def test_an_empty_block_is_zeros_with_a_finite_scale() -> None:
    """B032: no placeholder becomes a byte that means NaN."""
    code = torch.zeros(128, 128, dtype=torch.uint8)
    code[0, 64:] = 0x38
    packed, byte = mxfp4_fp8.requantize(code, torch.full((1, 1), 0.9 / 448), "even")
    assert int(byte.max()) < 0xFF
    assert byte[0, 0] == 0
    values = mxfp4.dequantize(packed, byte)
    assert bool((values[:, :64] == 0).all())
    assert float(values[0, 64]) == pytest.approx(0.9 / 448, rel=0.05)


@pytest.mark.parametrize("rule", RULES)
def test_the_named_rule_decides_where_a_group_is_clipped(rule: str) -> None:
    """B038: maxima from 4 to 8 by sixteenths, as far as E4M3 and bfloat16 hold them."""
    amax = torch.arange(4.0, 8.0 + 1 / 16, 1 / 16)
    code = torch.zeros(len(amax), 128, dtype=torch.uint8)
    code[:, 0] = 0x7E  # 448, times a scale that makes it amax
    for row, value in enumerate(amax.tolist()):
        scale = torch.full((1, 1), value / 448)
        packed, byte = mxfp4_fp8.requantize(code[row : row + 1], scale, rule)
        exponent = int(byte[0, 0]) - 127
        assert exponent == int(mxfp4.scale_exponent(torch.tensor(value).bfloat16(), rule))
        clipped = value / 2.0**exponent > 6.0
        assert not (clipped and rule in ("roundup", "ceil"))
        assert float(mxfp4.dequantize(packed, byte)[0, 0]) <= 6.0 * 2.0**exponent


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_and_what_bfloat16_cannot_hold_are_refused(code: int) -> None:
    data = torch.zeros(4, 32, dtype=torch.uint8)
    data[2, 5] = code
    with pytest.raises(ValueError, match="NaN, or code times scale"):
        mxfp4_fp8.requantize(data, torch.ones(1, 1))
    data[2, 5] = 0x7E
    with pytest.raises(ValueError, match="beyond bfloat16's largest"):
        mxfp4_fp8.requantize(data, torch.full((1, 1), 1e37))


def test_shapes_and_rules_that_do_not_fit() -> None:
    data = torch.zeros(4, 48, dtype=torch.uint8)
    with pytest.raises(ValueError, match="48, not a multiple of 32; pad it to 64"):
        mxfp4_fp8.requantize(data, torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"needs scales \[1, 1\], got \[1, 2\]"):
        mxfp4_fp8.requantize(data[:, :32], torch.ones(1, 2))
    with pytest.raises(ValueError, match="unknown MXFP4 scale rule 'best'"):
        mxfp4_fp8.requantize(data[:, :32], torch.ones(1, 1), "best")
