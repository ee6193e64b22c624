"""Rows of the latent KV cache and of the index-key cache.

A latent row is 512 latent values, then 64 rope values (zeros on layers without rope).

fp8_ds_mla   656 bytes: [0, 512) e4m3fn latent; [512, 528) 4 float32 scales, one for 128 latent
             values each; [528, 656) 64 bfloat16 rope values. Little endian.
e4m3         576 bytes: latent and rope in E4M3, one scale for the whole cache, kept beside it.
bf16, fp32   576 values.

Index keys are 128 values with one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.formats import e4m3, e8m0, fp8_tensor
from ml4core.formats.blocks import finite_amax
from ml4core.formats.exponent import ceil_exponent

LATENT = 512
ROPE = 64
ROW = LATENT + ROPE
TILE = 128
INDEX_KEY = 128

DS_MLA_BYTES = 656
_SCALES_END = LATENT + 4 * (LATENT // TILE)

# The floor of a latent scale, 1e-4, comes after the division by 448; 2**-13 is the least power of
# two not below it. The floor of an index scale comes before the division.
_DS_MLA_MIN_EXPONENT = -13
_INDEX_AMAX_FLOOR = 1e-4


def encode_fp8_ds_mla(row: Tensor) -> Tensor:
    """Bytes uint8 [..., 656] of latent rows [..., 576], float32 or bfloat16.

    Scales are powers of two, `2**ceil(log2(max(amax / 448, 1e-4)))`: readers narrow them to
    bfloat16 or E8M0, which only powers of two survive.
    """
    _check_width(row, ROW, "latent row")
    tiles = row[..., :LATENT].to(torch.float32).unflatten(-1, (-1, TILE))
    exponent = ceil_exponent(finite_amax(tiles), e4m3.E4M3FN.quant_max)
    scale = e8m0.pow2(exponent.clamp(min=_DS_MLA_MIN_EXPONENT))
    code = e4m3.encode(tiles / scale.unsqueeze(-1), "e4m3fn").flatten(-2)
    rope = row[..., LATENT:].to(torch.bfloat16)
    return torch.cat((code, _to_bytes(scale), _to_bytes(rope)), dim=-1)


def decode_fp8_ds_mla(stored: Tensor) -> Tensor:
    """Latent rows float32 [..., 576] of bytes uint8 [..., 656]; any float32 scale is accepted."""
    _check_width(stored, DS_MLA_BYTES, "fp8_ds_mla row")
    tiles = e4m3.decode(stored[..., :LATENT], "e4m3fn").unflatten(-1, (-1, TILE))
    scale = _from_bytes(stored[..., LATENT:_SCALES_END], torch.float32)
    rope = _from_bytes(stored[..., _SCALES_END:], torch.bfloat16)
    return torch.cat(((tiles * scale.unsqueeze(-1)).flatten(-2), rope.to(torch.float32)), dim=-1)


def encode_e4m3(row: Tensor, scale: Tensor | float, flavour: str) -> Tensor:
    """Bytes uint8 [..., 576] of latent rows [..., 576]: the E4M3 of `row / scale`, `scale` being
    one number.
    """
    _check_width(row, ROW, "latent row")
    return fp8_tensor.quantise(row, flavour, scale)[0]


def decode_e4m3(stored: Tensor, scale: Tensor | float, flavour: str) -> Tensor:
    """Latent rows float32 [..., 576] of bytes uint8 [..., 576]."""
    _check_width(stored, ROW, "e4m3 row")
    return fp8_tensor.dequantise(stored, scale, flavour)


def encode_bf16(row: Tensor) -> Tensor:
    """Stored bfloat16 [..., 576] of latent rows [..., 576]."""
    _check_width(row, ROW, "latent row")
    return row.to(torch.bfloat16)


def encode_fp32(row: Tensor) -> Tensor:
    """Stored float32 [..., 576] of latent rows [..., 576]."""
    _check_width(row, ROW, "latent row")
    return row.to(torch.float32)


def decode_wide(stored: Tensor) -> Tensor:
    """Latent rows float32 [..., 576] of stored bfloat16 or float32 [..., 576]."""
    _check_width(stored, ROW, "latent row")
    return stored.to(torch.float32)


def quantise_index(x: Tensor, flavour: str) -> tuple[Tensor, Tensor]:
    """Bytes uint8 [..., 128] and float32 scales [...] of index keys or index queries [..., 128].

    Scales are powers of two, `2**ceil(log2(max(amax, 1e-4) / quant_max))`.
    """
    _check_width(x, INDEX_KEY, "index key")
    amax = finite_amax(x).clamp(min=_INDEX_AMAX_FLOOR)
    scale = e8m0.pow2(ceil_exponent(amax, e4m3.flavour_of(flavour).quant_max))
    return e4m3.encode(x.to(torch.float32) / scale.unsqueeze(-1), flavour), scale


def dequantise_index(code: Tensor, scale: Tensor, flavour: str) -> Tensor:
    """Index keys float32 [..., 128] of bytes uint8 [..., 128] and float32 scales [...]."""
    _check_width(code, INDEX_KEY, "index key")
    return e4m3.decode(code, flavour) * scale.unsqueeze(-1)


def _to_bytes(values: Tensor) -> Tensor:
    """The bytes uint8 [..., n * itemsize] of `values` [..., n]."""
    return values.contiguous().view(torch.uint8)


def _from_bytes(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The values `dtype` [..., n] of bytes uint8 [..., n * itemsize]."""
    # A copy, because a slice of a page need not begin at a multiple of the item size.
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _check_width(x: Tensor, width: int, what: str) -> None:
    if x.shape[-1] != width:
        raise ValueError(f"{what} is {width} wide, got {x.shape[-1]} in shape {list(x.shape)}")
