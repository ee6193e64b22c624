"""E4M3 in its two flavours: `e4m3fn` (NVIDIA, gfx950, TPU) and `e4m3fnuz` (gfx940 to gfx942).

              e4m3fn        e4m3fnuz
bias          7             8
largest       448 (0x7E)    240 (0x7F)
NaN           0x7F, 0xFF    0x80
minus zero    0x80          none

The same byte reads half as large in e4m3fnuz, so bytes never travel without their flavour.

Encoding rounds to nearest, ties to even. Values beyond the largest, infinities too, saturate; NaN
stays NaN and is written as 0x7F (fn, whatever its sign) or 0x80 (fnuz).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True)
class Flavour:
    """One flavour of E4M3."""

    name: str
    dtype: torch.dtype
    max: float  # largest finite value; where encoding saturates
    quant_max: float  # what quantisers scale a block's largest magnitude to
    nan: int  # the byte written for NaN


E4M3FN = Flavour("e4m3fn", torch.float8_e4m3fn, max=448.0, quant_max=448.0, nan=0x7F)
# Quantisers of e4m3fnuz use 224, not 240: the bytes are then those of e4m3fn with a scale twice as
# large.
E4M3FNUZ = Flavour("e4m3fnuz", torch.float8_e4m3fnuz, max=240.0, quant_max=224.0, nan=0x80)

FLAVOURS: Mapping[str, Flavour] = MappingProxyType({f.name: f for f in (E4M3FN, E4M3FNUZ)})

_WIDE = (torch.float32, torch.bfloat16, torch.float16)


def flavour_of(name: str) -> Flavour:
    """The flavour called `name`; ValueError if there is none."""
    try:
        return FLAVOURS[name]
    except KeyError:
        raise ValueError(f"unknown E4M3 flavour {name!r}; known: {', '.join(FLAVOURS)}") from None


def encode(x: Tensor, flavour: str) -> Tensor:
    """Bytes uint8 [...] of `x` [...], float32, bfloat16 or float16. TypeError for another dtype."""
    spec = flavour_of(flavour)
    if x.dtype not in _WIDE:
        # float64 would be rounded twice, through float32.
        raise TypeError(f"E4M3 encodes float32, bfloat16 or float16, got {x.dtype}; convert first")
    # Clamping first settles overflow: torch's own casts saturate or give NaN depending on version
    # and device.
    clamped = x.to(torch.float32).clamp(-spec.max, spec.max)
    code = clamped.to(spec.dtype).contiguous().view(torch.uint8)
    if spec is E4M3FN:
        code = torch.where(code == 0xFF, spec.nan, code)
    return code


def decode(code: Tensor, flavour: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [...] of `code` [...] in `dtype`; exact in float32, bfloat16 and float16.

    `code` is uint8, or torch's own float8 dtype of the same flavour. TypeError for any other dtype.
    """
    spec = flavour_of(flavour)
    if code.dtype == torch.uint8:
        code = code.contiguous().view(spec.dtype)
    elif code.dtype != spec.dtype:
        raise TypeError(f"{flavour} decodes torch.uint8 or {spec.dtype}, got {code.dtype}")
    return code.to(dtype)


def fn_to_fnuz(code: Tensor) -> Tensor:
    """e4m3fnuz bytes uint8 [...] of e4m3fn bytes uint8 [...], worth half as much.

    The caller doubles the scale. The bytes stay as they are, but for minus zero (0x80, which is
    NaN in e4m3fnuz) that becomes zero, and for NaN (0x7F and 0xFF, which are numbers in e4m3fnuz)
    that becomes 0x80.
    """
    code = torch.where(code == 0x80, 0x00, code)
    return torch.where((code & 0x7F) == 0x7F, 0x80, code)
