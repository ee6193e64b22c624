"""Rows of the latent KV cache and of the index-key cache.

A latent row is L latent values, then R rope values (zeros on layers without rope); with L = 512
and R = 64:

fp8_ds_mla   656 bytes: [0, 512) e4m3fn latent; [512, 528) 4 float32 scales, one for 128 latent
             values each; [528, 656) 64 bfloat16 rope values. Little endian.
e4m3         576 bytes: latent and rope in E4M3, one scale for the whole cache, kept beside it.
bf16, fp32   576 values.
nvfp4_ds_mla 352 bytes: [0, 256) E2M1 latent, the even value in the low nibble; [256, 320) 64
             e4m3fn rope values without a scale; [320, 352) 32 e4m3fn scales, one for 16 latent
             values each, as the transpose of 8 x 4: that of group s at 8 (s % 4) + s // 4.

Index keys are D values with one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.formats import e2m1, e4m3, e8m0, fp8_tensor
from ml4core.formats.blocks import check_multiple, finite_amax
from ml4core.formats.exponent import ceil_exponent

LATENT = 512
TILE = 128
"""Latent values that a scale of fp8_ds_mla serves."""

GROUP = 16
"""Latent values that a scale of nvfp4_ds_mla serves."""

_MIN_E4M3 = 2.0**-9
_MAX_BYTE = 0x7E

# The floor of a latent scale, 1e-4, comes after the division by 448; 2**-13 is the least power of
# two not below it. The floor of an index scale comes before the division.
_DS_MLA_MIN_EXPONENT = -13
_INDEX_AMAX_FLOOR = 1e-4


def encode_fp8_ds_mla(row: Tensor, latent: int = LATENT) -> Tensor:
    """Bytes uint8 [..., L + 4 L/128 + 2 R] of latent rows [..., L + R], float32 or bfloat16.

    Scales are powers of two, `2**ceil(log2(max(amax / 448, 1e-4)))`: readers narrow them to
    bfloat16 or E8M0, which only powers of two survive.
    """
    _check_tiles(row, latent)
    tiles = row[..., :latent].to(torch.float32).unflatten(-1, (-1, TILE))
    exponent = ceil_exponent(finite_amax(tiles), e4m3.E4M3FN.quant_max)
    scale = e8m0.pow2(exponent.clamp(min=_DS_MLA_MIN_EXPONENT))
    code = e4m3.encode(tiles / scale.unsqueeze(-1), "e4m3fn").flatten(-2)
    rope = row[..., latent:].to(torch.bfloat16)
    return torch.cat((code, _to_bytes(scale), _to_bytes(rope)), dim=-1)


def decode_fp8_ds_mla(stored: Tensor, latent: int = LATENT) -> Tensor:
    """Latent rows float32 [..., L + R] of their bytes uint8; any float32 scale is accepted."""
    _check_tiles(stored, latent)
    scales_end = latent + 4 * (latent // TILE)
    tiles = e4m3.decode(stored[..., :latent], "e4m3fn").unflatten(-1, (-1, TILE))
    scale = _from_bytes(stored[..., latent:scales_end], torch.float32)
    rope = _from_bytes(stored[..., scales_end:], torch.bfloat16)
    return torch.cat(((tiles * scale.unsqueeze(-1)).flatten(-2), rope.to(torch.float32)), dim=-1)


def encode_nvfp4_ds_mla(row: Tensor, latent: int = LATENT) -> Tensor:
    """Bytes uint8 [..., L/2 + R + L/16] of latent rows [..., L + R], float32 or bfloat16.

    A group's scale is the least e4m3fn number that is not below `max(amax / 6, 2**-9)`, so that no
    finite value is beyond the largest code; above an amax of 2688 it is 448, and codes saturate.
    E2M1 has no NaN: it becomes +6 times the scale.
    """
    check_multiple(latent, 4 * GROUP, "the latent of nvfp4_ds_mla")
    groups = row[..., :latent].to(torch.float32).unflatten(-1, (-1, GROUP))
    wanted = (finite_amax(groups) / e2m1.MAX).clamp(min=_MIN_E4M3)
    byte = e4m3.encode(wanted, "e4m3fn")
    low = (e4m3.decode(byte, "e4m3fn") < wanted) & (byte < _MAX_BYTE)
    byte = byte + low.to(torch.uint8)
    code = e2m1.encode(groups / e4m3.decode(byte, "e4m3fn").unsqueeze(-1))
    rope = e4m3.encode(row[..., latent:], "e4m3fn")
    return torch.cat(
        (e2m1.pack(code.flatten(-2)), rope, byte.unflatten(-1, (-1, 4)).mT.flatten(-2)), dim=-1
    )


def decode_nvfp4_ds_mla(stored: Tensor, latent: int = LATENT) -> Tensor:
    """Latent rows float32 [..., L + R] of their bytes uint8."""
    check_multiple(latent, 4 * GROUP, "the latent of nvfp4_ds_mla")
    code, rest = stored[..., : latent // 2], stored[..., latent // 2 :]
    rope, byte = rest[..., : -(latent // GROUP)], rest[..., -(latent // GROUP) :]
    scale = e4m3.decode(byte.unflatten(-1, (4, -1)).mT.flatten(-2), "e4m3fn")
    groups = e2m1.decode(e2m1.unpack(code)).unflatten(-1, (-1, GROUP)) * scale.unsqueeze(-1)
    return torch.cat((groups.flatten(-2), e4m3.decode(rope, "e4m3fn")), dim=-1)


def encode_e4m3(row: Tensor, scale: Tensor | float, flavour: str) -> Tensor:
    """Bytes uint8 of latent rows: the E4M3 of `row / scale`, `scale` being one number."""
    return fp8_tensor.quantize(row, flavour, scale)[0]


def decode_e4m3(stored: Tensor, scale: Tensor | float, flavour: str) -> Tensor:
    """Latent rows float32 of bytes uint8."""
    return fp8_tensor.dequantize(stored, scale, flavour)


def quantize_index(x: Tensor, flavour: str) -> tuple[Tensor, Tensor]:
    """Bytes uint8 [..., D] and float32 scales [...] of index keys or index queries [..., D].

    Scales are powers of two, `2**ceil(log2(max(amax, 1e-4) / quant_max))`.
    """
    amax = finite_amax(x).clamp(min=_INDEX_AMAX_FLOOR)
    scale = e8m0.pow2(ceil_exponent(amax, e4m3.flavour_of(flavour).quant_max))
    return e4m3.encode(x.to(torch.float32) / scale.unsqueeze(-1), flavour), scale


def dequantize_index(code: Tensor, scale: Tensor, flavour: str) -> Tensor:
    """Index keys float32 [..., D] of bytes uint8 [..., D] and float32 scales [...]."""
    return e4m3.decode(code, flavour) * scale.unsqueeze(-1)


def _to_bytes(values: Tensor) -> Tensor:
    """The bytes uint8 [..., n * itemsize] of `values` [..., n]."""
    return values.contiguous().view(torch.uint8)


def _from_bytes(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The values `dtype` [..., n] of bytes uint8 [..., n * itemsize]."""
    if not stored.shape[-1]:  # the rope of a model without any: torch can't view no bytes anew
        return stored.to(dtype)
    # A copy, because a slice of a page need not begin at a multiple of the item size.
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _check_tiles(x: Tensor, latent: int) -> None:
    if latent % TILE or x.shape[-1] < latent:
        raise ValueError(
            f"fp8_ds_mla needs a latent of a multiple of {TILE} values in each row, got {latent} "
            f"in shape {list(x.shape)}"
        )
