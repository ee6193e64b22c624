"""An exact judge of the number formats: fractions and tables, no torch, no float arithmetic."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch


class Exact:
    """Formats by their definition.

    Values are `Fraction`, or one of the strings "nan", "inf", "-inf", "-0".
    """

    def __init__(self) -> None:
        self.e4m3 = {
            flavour: [self._e4m3(byte, flavour) for byte in range(256)]
            for flavour in ("e4m3fn", "e4m3fnuz")
        }
        # Magnitudes in ascending order; the index is the byte.
        self._e4m3_up = {
            "e4m3fn": self.e4m3["e4m3fn"][:0x7F],
            "e4m3fnuz": self.e4m3["e4m3fnuz"][:0x80],
        }
        self.e2m1_up = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]

    @staticmethod
    def _e4m3(byte: int, flavour: str) -> Fraction | str:
        bias = {"e4m3fn": 7, "e4m3fnuz": 8}[flavour]
        sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
        if flavour == "e4m3fn" and exponent == 15 and fraction == 7:
            return "nan"
        if byte == 0x80:
            return "nan" if flavour == "e4m3fnuz" else "-0"
        if exponent == 0:
            magnitude = Fraction(fraction, 8) * Fraction(2) ** (1 - bias)
        else:
            magnitude = (1 + Fraction(fraction, 8)) * Fraction(2) ** (exponent - bias)
        return -magnitude if sign else magnitude

    @staticmethod
    def value(bits: int) -> Fraction | str:
        """What 32 float bits stand for."""
        sign, exponent, fraction = bits >> 31, (bits >> 23) & 255, bits & 0x7FFFFF
        if exponent == 255:
            return "nan" if fraction else ("-inf" if sign else "inf")
        if exponent == 0:
            magnitude = Fraction(fraction, 1 << 149)
        else:
            magnitude = Fraction((1 << 23) + fraction) * Fraction(2) ** (exponent - 150)
        if sign:
            return -magnitude if magnitude else "-0"
        return magnitude

    @staticmethod
    def bits(x: float) -> int:
        """The 32 bits of a float32, given as a Python float."""
        return int(struct.unpack("<I", struct.pack("<f", x))[0])

    def of(self, x: float) -> Fraction | str:
        return self.value(self.bits(x))

    @staticmethod
    def nearest(magnitude: Fraction, table: list[Fraction]) -> int:
        """Index of the nearest entry, ties to the even index, the last for all beyond it."""
        above = bisect_left(table, magnitude)
        if above == len(table):
            return above - 1
        if table[above] == magnitude:
            return above
        down, up = magnitude - table[above - 1], table[above] - magnitude
        if down == up:
            return above if above % 2 == 0 else above - 1
        return above if up < down else above - 1

    def encode_e4m3(self, value: Fraction | str, flavour: str) -> int:
        fn = flavour == "e4m3fn"
        if value == "nan":
            return 0x7F if fn else 0x80
        table = self._e4m3_up[flavour]
        if value in ("inf", "-inf"):
            index, negative = len(table) - 1, value == "-inf"
        elif value == "-0":
            index, negative = 0, True
        else:
            index, negative = self.nearest(abs(value), table), value < 0
        if index == 0 and not fn:
            return 0
        return index | (0x80 if negative else 0)

    def encode_e2m1(self, value: Fraction | str) -> int:
        if value == "nan":
            return 7
        if value in ("inf", "-inf"):
            return 7 if value == "inf" else 15
        if value == "-0":
            return 8
        return self.nearest(abs(value), self.e2m1_up) | (8 if value < 0 else 0)

    def decode_e2m1(self, code: int) -> Fraction:
        return -self.e2m1_up[code & 7] if code & 8 else self.e2m1_up[code & 7]

    @staticmethod
    def least_exponent(x: Fraction, limit: Fraction) -> int:
        """The least e with x <= limit * 2**e."""
        e = math.frexp(float(x / limit))[1] - 2
        while x > limit * Fraction(2) ** e:
            e += 1
        return e

    @staticmethod
    def floor_log2(x: Fraction) -> int:
        e = math.frexp(float(x))[1] + 1
        while Fraction(2) ** e > x:
            e -= 1
        return e


@pytest.fixture(scope="session")
def exact() -> Exact:
    return Exact()


@pytest.fixture(scope="session")
def from_bits():
    """float32 tensor of a list of 32-bit patterns."""

    def make(patterns: list[int]) -> torch.Tensor:
        signed = [p - (1 << 32) if p >> 31 else p for p in patterns]
        return torch.tensor(signed, dtype=torch.int32).view(torch.float32)

    return make
