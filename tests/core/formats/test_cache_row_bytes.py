"""Latent rows and index keys, byte by byte."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml4core.formats import e4m3, kv_rows

GOLDEN_AMAX = [0.0, 0.01, 1.0, 3.5, 448.0, 500.0]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, 576, generator=generator)
    return x * torch.exp2(torch.randint(-20, 12, (*shape, 1), generator=generator).float())


def tile_scale(exact, values: list[float]) -> Fraction:
    """2**ceil(log2(max(amax / 448, 1e-4))) in exact arithmetic."""
    finite = [abs(v) for v in map(exact.of, values) if not isinstance(v, str)]
    wanted = max([v / 448 for v in finite] + [Fraction(1, 10000)])
    return Fraction(2) ** exact.least_exponent(wanted, Fraction(1))


def judge_fp8_ds_mla(exact, row: list[float]) -> bytes:
    values, scales = [], []
    for tile in range(4):
        part = row[128 * tile : 128 * tile + 128]
        scale = tile_scale(exact, part)
        scales.append(float(scale))
        for v in map(exact.of, part):
            scaled = v if isinstance(v, str) else v / scale
            values.append(exact.encode_e4m3(scaled, "e4m3fn"))
    rope = torch.tensor(row[512:]).to(torch.bfloat16).view(torch.int16).tolist()
    return bytes(values) + struct.pack("<4f", *scales) + struct.pack("<64h", *rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_ds_mla_bytes(exact, dtype):
    x = rows(2, 3).to(dtype)
    stored = kv_rows.encode_fp8_ds_mla(x)
    assert stored.shape == (2, 3, 656)
    assert stored.dtype == torch.uint8
    for i in range(2):
        for j in range(3):
            assert bytes(stored[i, j].tolist()) == judge_fp8_ds_mla(exact, x[i, j].tolist())


def test_fp8_ds_mla_golden_scales():
    x = torch.zeros(len(GOLDEN_AMAX), 576)
    x[:, 200] = torch.tensor(GOLDEN_AMAX)
    stored = kv_rows.encode_fp8_ds_mla(x)
    scales = [struct.unpack("<4f", bytes(row[512:528].tolist())) for row in stored]
    assert [s[1] for s in scales] == [2.0**-13, 2.0**-13, 2.0**-8, 2.0**-7, 1.0, 2.0]
    assert {s[i] for s in scales for i in (0, 2, 3)} == {2.0**-13}


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=24), st.integers(0, 511))
def test_fp8_ds_mla_of_anything(exact, from_bits, patterns, start):
    x = torch.zeros(576)
    x[start : start + len(patterns)] = from_bits(patterns)[: 576 - start]
    x[512:] = torch.nan_to_num(x[512:])
    expected = judge_fp8_ds_mla(exact, x.tolist())
    assert bytes(kv_rows.encode_fp8_ds_mla(x).tolist()) == expected


def test_fp8_ds_mla_back():
    """Values are exact multiples of their scale, rope is bfloat16 untouched."""
    x = rows(5)
    x[1, 512:] = 0
    stored = kv_rows.encode_fp8_ds_mla(x)
    back = kv_rows.decode_fp8_ds_mla(stored)
    assert back.dtype == torch.float32
    assert torch.equal(back[:, 512:], x[:, 512:].to(torch.bfloat16).float())
    assert torch.equal(kv_rows.encode_fp8_ds_mla(back), stored)
    largest = x[:, :512].unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True).clamp(min=2.0**-13)
    error = (back - x)[:, :512].unflatten(-1, (4, 128)).abs()
    assert (error <= largest / 16).all()


def test_fp8_ds_mla_reads_any_scale_at_any_address():
    """Older writers store scales that are no powers of two; a row need not be aligned."""
    page = torch.zeros(3 * 656 + 1, dtype=torch.uint8)
    row = page[1 + 656 : 1 + 2 * 656]
    row[:512] = 0x38  # 1.0
    scales = [0.3, 1e-30, 7.0, 123.456]
    row[512:528] = torch.tensor(list(struct.pack("<4f", *scales)), dtype=torch.uint8)
    row[528:] = torch.tensor([0x80, 0xBF] * 64, dtype=torch.uint8)  # -1.0
    back = kv_rows.decode_fp8_ds_mla(row)
    assert back[:512].view(4, 128)[:, 5].tolist() == torch.tensor(scales).tolist()
    assert (back[512:] == -1.0).all()


def test_fp8_ds_mla_of_what_is_not_finite():
    x = torch.full((1, 576), 0.5)
    clean = kv_rows.encode_fp8_ds_mla(x)
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    x[0, 512:514] = torch.tensor([math.inf, math.nan])
    stored = kv_rows.encode_fp8_ds_mla(x)
    assert stored[0, :3].tolist() == [0x7E, 0xFE, 0x7F]
    assert torch.equal(stored[0, 3:528], clean[0, 3:528])
    rope = kv_rows.decode_fp8_ds_mla(stored)[0, 512:]
    assert rope[0] == math.inf
    assert rope[1].isnan()
    assert (rope[2:] == 0.5).all()


@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("scale", [1.0, 0.3, torch.tensor([0.3])])
def test_e4m3_rows(exact, flavour, scale):
    x = rows(2, 3)
    stored = kv_rows.encode_e4m3(x, scale, flavour)
    assert stored.shape == x.shape
    assert stored.dtype == torch.uint8
    number = torch.as_tensor(scale, dtype=torch.float32).reshape(())
    divided = (x.numpy() / number.numpy()).flatten().tolist()
    expected = [exact.encode_e4m3(exact.of(v), flavour) for v in divided]
    assert stored.flatten().tolist() == expected
    back = kv_rows.decode_e4m3(stored, scale, flavour)
    assert torch.equal(back, e4m3.decode(stored, flavour) * number)


def test_e4m3_rows_are_not_portable_between_flavours():
    """B021"""
    x = torch.full((1, 576), 1.5)
    stored = kv_rows.encode_e4m3(x, 1.0, "e4m3fn")
    assert torch.equal(kv_rows.decode_e4m3(stored, 1.0, "e4m3fn"), x)
    assert torch.equal(kv_rows.decode_e4m3(stored, 1.0, "e4m3fnuz"), x / 2)


@pytest.mark.parametrize(
    ("flavour", "shift", "empty"), [("e4m3fn", 0, 2.0**-22), ("e4m3fnuz", 1, 2.0**-21)]
)
def test_index_golden_scales(flavour, shift, empty):
    x = torch.zeros(len(GOLDEN_AMAX), 128)
    x[:, 77] = -torch.tensor(GOLDEN_AMAX)
    code, scale = kv_rows.quantize_index(x, flavour)
    assert code.shape == x.shape
    assert scale.tolist() == [empty] + [
        s * 2**shift for s in (2.0**-15, 2.0**-8, 2.0**-7, 1.0, 2.0)
    ]
    back = kv_rows.dequantize_index(code, scale, flavour)
    assert back[2:5].sum(-1).tolist() == [-1.0, -3.5, -448.0]


@pytest.mark.parametrize(("flavour", "limit"), [("e4m3fn", 448), ("e4m3fnuz", 224)])
@given(patterns=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=128))
def test_index_of_anything(exact, from_bits, flavour, limit, patterns):
    x = torch.zeros(128)
    x[: len(patterns)] = from_bits(patterns)
    values = [exact.of(v) for v in x.tolist()]
    finite = [abs(v) for v in values if not isinstance(v, str)]
    amax = max([*finite, exact.of(1e-4)])
    expected = Fraction(2) ** exact.least_exponent(amax / limit, Fraction(1))
    scaled = [v if isinstance(v, str) else v / expected for v in values]
    code, scale = kv_rows.quantize_index(x, flavour)
    assert scale.shape == ()
    assert exact.of(scale.item()) == expected
    assert code.tolist() == [exact.encode_e4m3(v, flavour) for v in scaled]


def test_index_queries_have_a_scale_for_each_head():
    q = torch.randn(3, 32, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    code, scale = kv_rows.quantize_index(q.to(torch.bfloat16), "e4m3fn")
    assert code.shape == (3, 32, 128)
    assert scale.shape == (3, 32)
    error = (kv_rows.dequantize_index(code, scale, "e4m3fn") - q).abs()
    assert (error <= q.abs().amax(-1, keepdim=True) / 16).all()


@pytest.mark.parametrize(
    ("width", "latent"), [(400, 512), (576, 500), (192, 192)], ids=["short", "odd", "no tile"]
)
def test_a_latent_that_has_no_tiles_is_refused(width, latent):
    with pytest.raises(
        ValueError, match=rf"multiple of 128 .* got {latent} in shape \[2, {width}\]"
    ):
        kv_rows.encode_fp8_ds_mla(torch.zeros(2, width), latent)


def test_other_widths_follow_the_same_rule():
    x = rows(4)[:, :320]  # a latent of 256 and 64 rope values
    stored = kv_rows.encode_fp8_ds_mla(x, 256)
    assert stored.shape == (4, 256 + 8 + 128)
    wide = torch.cat([x[:, :256], x[:, :256], x[:, 256:]], dim=-1)
    back = kv_rows.decode_fp8_ds_mla(kv_rows.encode_fp8_ds_mla(wide))
    assert torch.equal(kv_rows.decode_fp8_ds_mla(stored, 256), back[:, 256:])
