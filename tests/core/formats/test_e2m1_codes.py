"""E2M1 codes and their packing, against the table and fractions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml4core.formats import e2m1


def all_codes() -> torch.Tensor:
    return torch.arange(16, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code(dtype):
    expected = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected += [-v for v in expected]
    got = e2m1.decode(all_codes(), dtype)
    assert got.dtype == dtype
    assert str(got.tolist()) == str(expected)


def test_every_code_survives_a_round_trip():
    assert torch.equal(e2m1.encode(e2m1.decode(all_codes())), all_codes())


def test_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1.encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1.encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    below, above = torch.nextafter(ties, ties - 1), torch.nextafter(ties, ties + 1)
    assert e2m1.encode(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert e2m1.encode(above).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_beyond_the_range():
    x = torch.tensor([6.0, 6.01, 1e30, math.inf, -7.0, -math.inf, math.nan, 0.0, -0.0, -1e-30])
    x = torch.cat((x, torch.copysign(x[6:7], torch.tensor(-1.0))))
    assert e2m1.encode(x).tolist() == [7, 7, 7, 7, 15, 15, 7, 0, 8, 8, 7]


def test_every_bfloat16(exact):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    expected = [exact.encode_e2m1(exact.value(b << 16)) for b in range(1 << 16)]
    assert e2m1.encode(x).tolist() == expected


@given(patterns=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64))
def test_any_float32(exact, from_bits, patterns):
    expected = [exact.encode_e2m1(exact.value(p)) for p in patterns]
    assert e2m1.encode(from_bits(patterns)).tolist() == expected


def test_the_even_element_is_the_low_nibble():
    packed = e2m1.pack(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]
    assert e2m1.unpack(packed).tolist() == [[1, 2, 15, 0]]


def test_every_byte_unpacks_and_packs():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = e2m1.unpack(packed)
    assert codes.tolist() == [n for b in range(256) for n in (b & 15, b >> 4)]
    assert torch.equal(e2m1.pack(codes), packed)


def test_an_odd_row_is_refused():
    with pytest.raises(ValueError, match="codes in a row is 3, not a multiple of 2; pad it to 4"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))
