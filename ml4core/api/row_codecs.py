"""Rows to the stored values of a layout's fields, and back. Loaded at first use: it needs torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ml4core.api.layouts import KVField, KVPart
from ml4core.api.pages import field_slice
from ml4core.formats import e2m1, e4m3, e8m0, index_pages, kv_rows


@dataclass(frozen=True)
class RowCodec:
    """One way to store rows.

    Attributes:
        encode: ``(rows [..., width], cache scale)`` to the stored values of each field, joined in
            order of offset: ``[..., part width]``.
        decode: ``(tokens [..., part width], cache scale)`` to rows fp32 ``[..., width]``; may be
            the tokens themselves.
    """

    encode: Callable[[Tensor, Tensor | None], Tensor]
    decode: Callable[[Tensor, Tensor | None], Tensor]


def field_values(part: KVPart, field: KVField, tokens: Tensor) -> Tensor:
    """The numbers fp32 ``[..., count]`` of a field of tokens ``[..., part width]``."""
    raw = tokens[..., field_slice(part, field)]
    if part.dtype != "uint8":
        return raw.to(torch.float32)
    if field.dtype in ("e4m3fn", "e4m3fnuz"):
        return e4m3.decode(raw, field.dtype)
    if field.dtype == "e2m1":
        return e2m1.decode(e2m1.unpack(raw))[..., : field.count]
    if field.dtype == "ue8m0":
        return e8m0.decode(raw)
    if field.dtype == "ue8m0x4":
        return e8m0.decode(raw[..., ::4])
    return _numbers(raw, getattr(torch, field.dtype))


def ds_mla(latent: int) -> RowCodec:
    """E4M3 latent in tiles of 128 with a scale each, bfloat16 rope."""
    return RowCodec(
        lambda rows, scale: kv_rows.encode_fp8_ds_mla(rows, latent),
        lambda tokens, scale: kv_rows.decode_fp8_ds_mla(tokens, latent),
    )


def nvfp4_ds_mla(latent: int) -> RowCodec:
    """E2M1 latent in groups of 16 with an E4M3 scale each, E4M3 rope."""
    return RowCodec(
        lambda rows, scale: kv_rows.encode_nvfp4_ds_mla(rows, latent),
        lambda tokens, scale: kv_rows.decode_nvfp4_ds_mla(tokens, latent),
    )


def per_tensor(flavour: str) -> RowCodec:
    """E4M3 of the row divided by the cache's scale; 1 if it has none."""

    return RowCodec(
        lambda rows, scale: kv_rows.encode_e4m3(rows, 1.0 if scale is None else scale, flavour),
        lambda tokens, scale: kv_rows.decode_e4m3(tokens, 1.0 if scale is None else scale, flavour),
    )


def wide(dtype: str) -> RowCodec:
    """The row in ``bfloat16`` or ``float32``."""
    stored = getattr(torch, dtype)

    def encode(rows: Tensor, scale: Tensor | None) -> Tensor:
        return rows.to(stored)

    def decode(tokens: Tensor, scale: Tensor | None) -> Tensor:
        return tokens.to(torch.float32)

    return RowCodec(encode, decode)


def index_key(form: str) -> RowCodec:
    """An E4M3 key, then its scale: ``f32``, ``ue8m0x4`` or ``ue8m0``."""

    def encode(rows: Tensor, scale: Tensor | None) -> Tensor:
        code, factor = kv_rows.quantize_index(rows, "e4m3fn")
        return torch.cat((code, index_pages.encode_scale(factor, form)), dim=-1)

    def decode(tokens: Tensor, scale: Tensor | None) -> Tensor:
        code, stored = (
            tokens[..., : -index_pages.SCALE_BYTES],
            tokens[..., -index_pages.SCALE_BYTES :],
        )
        return kv_rows.dequantize_index(code, index_pages.decode_scale(stored, form), "e4m3fn")

    return RowCodec(encode, decode)


def _numbers(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers fp32 ``[..., n]`` of bytes uint8 ``[..., n * itemsize]``, little endian."""
    # A copy, because a slice of a token need not begin at a multiple of the item size.
    copy = stored.clone(memory_format=torch.contiguous_format)
    return copy.view(dtype).to(torch.float32)
