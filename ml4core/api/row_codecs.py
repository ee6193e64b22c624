"""Rows to the stored values of a layout's fields, and back. Loaded at first use: it needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ml4core.api.layouts import KVField, KVPart
from ml4core.api.pages import field_slice
from ml4core.formats import e4m3, e8m0, exponent, fp8_tensor, index_pages
from ml4core.formats.blocks import finite_amax

SCALED = 128
"""Values that a scale of fp8_ds_mla serves."""

_DS_MLA_MIN_EXPONENT = -13  # the least power of two >= 1e-4: a floor after the division by 448
_INDEX_AMAX_FLOOR = 1e-4  # a floor before the division


@dataclass(frozen=True)
class RowCodec:
    """One way to store rows.

    Attributes:
        encode: ``(rows [..., width], cache scale)`` to the stored values of each field, joined in
            order of offset: ``[..., part width]``.
        decode: the numbers of each field, as ``field_values`` gives them, and the cache's scale,
            to rows fp32 ``[..., width]``.
    """

    encode: Callable[[Tensor, Tensor | None], Tensor]
    decode: Callable[[Sequence[Tensor], Tensor | None], Tensor]


def field_values(part: KVPart, field: KVField, tokens: Tensor) -> Tensor:
    """The numbers fp32 ``[..., count]`` of a field of tokens ``[..., part width]``."""
    raw = tokens[..., field_slice(part, field)]
    if part.dtype != "uint8":
        return raw.to(torch.float32)
    if field.dtype in ("e4m3fn", "e4m3fnuz"):
        return e4m3.decode(raw, field.dtype)
    if field.dtype == "ue8m0x4":
        return e8m0.decode(raw[..., ::4])
    # A copy, because a slice of a token need not begin at a multiple of the item size.
    copy = raw.clone(memory_format=torch.contiguous_format)
    return copy.view(getattr(torch, field.dtype)).to(torch.float32)


def quantise_index(x: Tensor, flavour: str) -> tuple[Tensor, Tensor]:
    """Bytes uint8 ``[..., D]`` and fp32 scales ``[...]`` of index keys or queries ``[..., D]``.

    Scales are powers of two, ``2**ceil(log2(max(amax, 1e-4) / quant_max))``.
    """
    amax = finite_amax(x).clamp(min=_INDEX_AMAX_FLOOR)
    limit = e4m3.flavour_of(flavour).quant_max
    scale = e8m0.pow2(exponent.ceil_exponent(amax, limit))
    return e4m3.encode(x.to(torch.float32) / scale.unsqueeze(-1), flavour), scale


def ds_mla(latent: int) -> RowCodec:
    """E4M3 latent in tiles of 128 with a scale each, bfloat16 rope."""

    def encode(rows: Tensor, scale: Tensor | None) -> Tensor:
        tiles = _scaled_tiles(rows[..., :latent].to(torch.float32))
        power = exponent.ceil_exponent(finite_amax(tiles), e4m3.E4M3FN.quant_max)
        # Readers narrow the scales to bfloat16 or E8M0, which only powers of two survive.
        factor = e8m0.pow2(power.clamp(min=_DS_MLA_MIN_EXPONENT))
        code = e4m3.encode(tiles / factor.unsqueeze(-1), "e4m3fn").flatten(-2)
        return torch.cat((code, _bytes(factor), _bytes(rows[..., latent:].to(torch.bfloat16))), -1)

    def decode(fields: Sequence[Tensor], scale: Tensor | None) -> Tensor:
        code, factor, *rope = fields
        values = (_scaled_tiles(code) * factor.unsqueeze(-1)).flatten(-2)
        return torch.cat((values, *rope), dim=-1)

    return RowCodec(encode, decode)


def per_tensor(flavour: str) -> RowCodec:
    """E4M3 of the row divided by the cache's scale; 1 if it has none."""

    def encode(rows: Tensor, scale: Tensor | None) -> Tensor:
        return fp8_tensor.quantise(rows, flavour, 1.0 if scale is None else scale)[0]

    def decode(fields: Sequence[Tensor], scale: Tensor | None) -> Tensor:
        rows = torch.cat(list(fields), dim=-1)
        return rows if scale is None else rows * scale

    return RowCodec(encode, decode)


def wide(dtype: str) -> RowCodec:
    """The row in ``bfloat16`` or ``float32``."""
    stored = getattr(torch, dtype)

    def encode(rows: Tensor, scale: Tensor | None) -> Tensor:
        return rows.to(stored)

    def decode(fields: Sequence[Tensor], scale: Tensor | None) -> Tensor:
        return torch.cat(list(fields), dim=-1) if len(fields) > 1 else fields[0]

    return RowCodec(encode, decode)


def index_key(form: str) -> RowCodec:
    """An E4M3 key, then its scale: ``f32`` or ``ue8m0x4``."""

    def encode(rows: Tensor, scale: Tensor | None) -> Tensor:
        code, factor = quantise_index(rows, "e4m3fn")
        return torch.cat((code, index_pages.encode_scale(factor, form)), dim=-1)

    def decode(fields: Sequence[Tensor], scale: Tensor | None) -> Tensor:
        code, factor = fields
        return code * factor

    return RowCodec(encode, decode)


def _scaled_tiles(values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:-1], -1, SCALED)


def _bytes(values: Tensor) -> Tensor:
    """The bytes uint8 ``[..., n * itemsize]`` of values ``[..., n]``, little endian."""
    return values.contiguous().view(torch.uint8)
