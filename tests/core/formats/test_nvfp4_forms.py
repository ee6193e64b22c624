"""NVFP4 in both forms of its global scale, its scale checks and the tiled order of its scales."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml4core.formats import check_scales, e2m1, nvfp4, scale_swizzle

forms = pytest.mark.parametrize("form", ["divisor", "multiplier"])


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.exp2(torch.randint(-4, 4, shape, generator=generator).float())


def global_scale(x: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    return {form: {"divisor": nvfp4.global_divisor, "multiplier": nvfp4.global_multiplier}[form](x)}


def judge_group(exact, group: np.ndarray, form: str, scale: np.float32) -> tuple[int, list[int]]:
    """Scale byte and codes of one group of 16, in numpy float32 and fractions."""
    finite = np.abs(group[np.isfinite(group)])
    unit = (finite.max() if finite.size else np.float32(0)) / np.float32(6)
    wanted = unit * scale if form == "divisor" else unit / scale
    byte = exact.encode_e4m3(exact.of(float(wanted)), "e4m3fn") or 1
    local = np.float32(float(exact.e4m3["e4m3fn"][byte]))
    factor = local / scale if form == "divisor" else local * scale
    codes = [exact.encode_e2m1(exact.of(float(v / factor))) for v in group]
    return byte, codes


@pytest.mark.parametrize(
    ("amax", "divisor"), [(2.0, 1344.0), (2688.0, 1.0), (0.5, 5376.0), (2.0**-60, 2688.0 * 2.0**60)]
)
def test_golden_global_scale(amax, divisor):
    x = torch.tensor([[amax / 3, -amax, math.inf, math.nan]])
    assert nvfp4.global_divisor(x).item() == divisor
    assert nvfp4.global_multiplier(x).item() == (torch.tensor(amax) / torch.tensor(2688.0)).item()
    assert nvfp4.reciprocal(torch.tensor([divisor])).tolist() == [
        (1 / torch.tensor(divisor)).item()
    ]


@forms
def test_groups(exact, form):
    x = weight(4, 5, 64)
    scale = global_scale(x, form)
    packed, byte = nvfp4.quantize(x, **scale)
    assert packed.shape == (4, 5, 32)
    assert byte.shape == (4, 5, 4)
    assert packed.dtype == byte.dtype == torch.uint8
    codes = e2m1.unpack(packed).unflatten(-1, (4, 16)).flatten(0, 2)
    groups = x.unflatten(-1, (4, 16)).flatten(0, 2).numpy()
    number = np.float32(scale[form].item())
    for index, group in enumerate(groups):
        expected = judge_group(exact, group, form, number)
        assert (byte.flatten()[index].item(), codes[index].tolist()) == expected
    back = nvfp4.dequantize(packed, byte, **scale)
    assert (back - x).abs().max() <= x.abs().max() / 6 * 1.07
    assert back.abs().max().item() == pytest.approx(x.abs().max().item(), rel=1e-6)
    low = nvfp4.dequantize(packed, byte, **scale, dtype=torch.bfloat16)
    assert torch.equal(low, back.to(torch.bfloat16))


@forms
@given(
    bits=st.lists(st.integers(0x30000000, 0x4FFFFFFF), min_size=16, max_size=16),
    signs=st.integers(0, 0xFFFF),
    top=st.floats(2.0**-30, 2.0**33, width=32),
)
def test_any_group(exact, from_bits, form, bits, signs, top):
    """Group and global maxima independent of each other: saturated and vanishing scales too."""
    x = from_bits([b | ((signs >> i & 1) << 31) for i, b in enumerate(bits)])
    scale = global_scale(torch.tensor([top]), form)
    packed, byte = nvfp4.quantize(x, **scale)
    expected = judge_group(exact, x.numpy(), form, np.float32(scale[form].item()))
    assert (byte.item(), e2m1.unpack(packed).tolist()) == expected
    assert 0x01 <= byte.item() <= 0x7E


@forms
def test_every_code_under_every_scale(exact, form):
    byte = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    packed = torch.tensor([0x10 * (n + 1) + n for n in range(0, 16, 2)], dtype=torch.uint8)
    scale = torch.tensor(1344.0 if form == "divisor" else 1 / 1344.0)
    got = nvfp4.dequantize(packed.repeat(len(byte), 1), byte.unsqueeze(1), **{form: scale})
    for row, b in enumerate(byte.tolist()):
        value = exact.e4m3["e4m3fn"][b]
        local = np.float32(0 if isinstance(value, str) else float(value))
        number = np.float32(scale.item())
        factor = local / number if form == "divisor" else local * number
        expected = [float(np.float32(float(exact.decode_e2m1(c))) * factor) for c in range(16)]
        assert got[row].tolist() == expected


def test_one_form_becomes_the_other():
    """Bytes are shared, the values agree to the last bits, and swapped forms are far off."""
    x = weight(8, 64)
    divisor = nvfp4.global_divisor(x)
    packed, byte = nvfp4.quantize(x, divisor=divisor)
    multiplier = nvfp4.reciprocal(divisor)
    a = nvfp4.dequantize(packed, byte, divisor=divisor)
    b = nvfp4.dequantize(packed, byte, multiplier=multiplier)
    assert torch.allclose(a, b, rtol=2.0**-22, atol=0)
    back = nvfp4.dequantize(packed, byte, divisor=nvfp4.reciprocal(multiplier))
    assert torch.allclose(a, back, rtol=2.0**-22, atol=0)
    swapped = nvfp4.dequantize(packed, byte, multiplier=divisor)
    assert (swapped - a).abs().max() > 100 * a.abs().max()


def test_parts_may_have_their_own_global_scale():
    """As experts whose gate and up projections are stacked by rows."""
    parts = [weight(6, 32, seed=1), weight(6, 32, seed=2) * 50]
    divisors = torch.stack([nvfp4.global_divisor(p) for p in parts])
    by_row = divisors.repeat_interleave(6).unsqueeze(1)
    packed, byte = nvfp4.quantize(torch.cat(parts), divisor=by_row)
    back = nvfp4.dequantize(packed, byte, divisor=by_row)
    for index, part in enumerate(parts):
        one = nvfp4.quantize(part, divisor=divisors[index])
        rows = slice(6 * index, 6 * index + 6)
        assert torch.equal(byte[rows], one[1])
        assert torch.equal(back[rows], nvfp4.dequantize(*one, divisor=divisors[index]))


@forms
@pytest.mark.parametrize("top", [0.9, 1e-30, 3e38])
def test_a_group_of_zeros_has_a_finite_scale(form, top):
    """B032"""
    x = torch.zeros(3, 48)
    x[1, 20] = top
    scale = global_scale(x, form)
    packed, byte = nvfp4.quantize(x, **scale)
    check_scales(byte, "e4m3fn", "w")
    assert byte.tolist() == [[1, 1, 1], [1, 0x7E if top > 1e-10 else 1, 1], [1, 1, 1]]
    back = nvfp4.dequantize(packed, byte, **scale)
    assert torch.equal(back == 0, (x == 0) | (x < 1e-20))


@forms
@pytest.mark.parametrize("bad", [0.0, math.inf])
def test_a_tensor_of_zeros_stays_zero(form, bad):
    x = torch.zeros(2, 32)
    assert global_scale(x, form)[form].item() == 1.0
    for scale in (global_scale(x, form), {form: torch.tensor(bad)}):
        packed, byte = nvfp4.quantize(x, **scale)
        check_scales(byte, "e4m3fn", "w")
        assert (packed == 0).all()
    zero_scales = torch.zeros_like(byte)
    assert (nvfp4.dequantize(packed, zero_scales, **{form: torch.tensor(bad)}) == 0).all()


@forms
def test_what_is_not_finite_does_not_count_for_the_scale(form):
    x = torch.full((1, 16), 3.0)
    scale = global_scale(x, form)
    clean = nvfp4.quantize(x, **scale)[1]
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    assert torch.equal(global_scale(x, form)[form], scale[form])
    packed, byte = nvfp4.quantize(x, **scale)
    assert torch.equal(byte, clean)
    assert e2m1.unpack(packed)[0, :4].tolist() == [7, 15, 7, 7]


@pytest.mark.parametrize(
    ("fmt", "byte", "shown"),
    [
        ("e4m3fn", 0x7F, "0x7F"),
        ("e4m3fn", 0xFF, "0xFF"),
        ("e4m3fnuz", 0x80, "0x80"),
        ("e8m0", 0xFF, "0xFF"),
    ],
)
def test_a_nan_scale_is_refused_by_name(fmt, byte, shown):
    """B032"""
    scale = torch.full((3, 40, 8), 0x38, dtype=torch.uint8)
    check_scales(scale, fmt, "experts.w1.weight_scale")
    scale[2, 7, 5] = byte
    scale[2, 9, 0] = byte
    message = rf"experts\.w1\.weight_scale\[2\]: the scale of row 7, block 5 is the byte {shown}"
    with pytest.raises(ValueError, match=message + rf".* NaN in {fmt} \(2 of 960 scales"):
        check_scales(scale, fmt, "experts.w1.weight_scale")
    with pytest.raises(ValueError, match=r"^w: the scale of row 7, block 5 "):
        check_scales(scale[2], fmt, "w")


def test_scales_are_checked_in_float8_too():
    scale = torch.ones(4, 4).to(torch.float8_e4m3fn)
    check_scales(scale, "e4m3fn", "w")
    with pytest.raises(ValueError, match="row 0, block 1"):
        check_scales(torch.tensor([[1.0, math.nan]]).to(torch.float8_e4m3fn), "e4m3fn", "w")
    with pytest.raises(ValueError, match="unknown scale format 'fp8'; known: e4m3fn, e4m3fnuz, e8"):
        check_scales(scale, "fp8", "w")


def test_wrong_arguments_are_named():
    x = torch.ones(2, 16)
    with pytest.raises(ValueError, match="either divisor= or multiplier=, got neither"):
        nvfp4.quantize(x)
    with pytest.raises(ValueError, match="either divisor= or multiplier=, got both"):
        nvfp4.quantize(x, divisor=torch.ones(1), multiplier=torch.ones(1))
    with pytest.raises(ValueError, match="the last axis is 24, not a multiple of 16; pad it to 32"):
        nvfp4.quantize(torch.zeros(2, 24), divisor=torch.ones(1))
    packed = torch.zeros(2, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="rows of 8 bytes need 1 scales, got 2"):
        nvfp4.dequantize(packed, packed[:, :2], divisor=torch.ones(1))


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (127, 4), (128, 4), (130, 9), (300, 12)])
def test_swizzled_scales_are_padded_with_zeros(rows, blocks):
    """B036: each byte at its place, and zeros, never junk, where there is no scale."""
    generator = torch.Generator().manual_seed(rows)
    scale = torch.randint(1, 127, (rows, blocks), dtype=torch.uint8, generator=generator)
    tiled = scale_swizzle.swizzle(scale)
    assert tuple(tiled.shape) == scale_swizzle.padded_shape(rows, blocks)
    expected = [0] * tiled.numel()
    tiles_across = tiled.shape[1] // 4
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * tiles_across + block // 4
            offset = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            expected[tile * 512 + offset] = scale[row, block].item()
    assert tiled.flatten().tolist() == expected
    assert torch.equal(scale_swizzle.unswizzle(tiled, rows, blocks), scale)
    experts = torch.stack((scale, scale.flip(0)))
    assert torch.equal(scale_swizzle.swizzle(experts)[0], tiled)
    assert torch.equal(
        scale_swizzle.unswizzle(scale_swizzle.swizzle(experts), rows, blocks), experts
    )
