"""Every open cache layout as a loop over tokens and bytes, written from the words that define it.

It shares nothing with the product's codecs. A page is a flat run of bytes; ``offsets`` says where
each byte of a token lies in it, and ``encode`` which bytes a row becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ml4core_conformance.oracle import kv_numbers as numbers
from ml4core_conformance.oracle.kv_numbers import Array
from ml4core_conformance.oracle.numbers import (
    NVFP4_GROUP,
    e2m1_decode,
    e2m1_encode,
    pack_nibbles,
    unpack_nibbles,
)

LATENT, ROPE, KEY = 512, 64, 128
"""Published widths: values of a latent row, of its rope part, and of an index key."""
Codec = tuple[Callable[[Array, float], Array], Callable[[Array, float], Array]]

_TILE = 128  # latent values that a scale of fp8_ds_mla serves
_SQUARE = 16  # tokens, and bytes, of a tile of tiled16_f32
_LANES = 128  # tokens side by side in a vector register of those that read lane33_ue8m0


@dataclass(frozen=True)
class ByteLayout:
    """One open layout.

    Attributes:
        id, role: as in ``ml4core.api.known_layouts``.
        width: values of a canonical row.
        token_bytes: bytes a token.
        dtype: torch name of the array's dtype.
        form: of the array: ``rows`` [blocks, block_size, values], ``flat`` [blocks, bytes of a
            page], or ``lanes`` [blocks, bytes of a token, block_size].
        scaled: whether the cache has one scale for all.
        encode_rows: bytes [n, token_bytes] of rows fp32 [n, width] and the cache's scale.
        decode_tokens: rows fp64 [n, width] of bytes [n, token_bytes] and the cache's scale.
        offset: of byte ``i`` of token ``t`` in a page of ``block_size`` tokens.
        multiple: of which page sizes are multiples where the layout is served: bytes or hardware
            may ask for it.
    """

    id: str
    role: str
    width: int
    token_bytes: int
    dtype: str
    form: Literal["rows", "flat", "lanes"]
    scaled: bool
    encode_rows: Callable[[Array, float], Array]
    decode_tokens: Callable[[Array, float], Array]
    offset: Callable[[int, int, int], int]
    multiple: int = 1

    def offsets(self, block_size: int) -> Array:
        """int64 [block_size, token_bytes]: where each byte of each token lies in its page."""
        return _offsets(self, block_size)

    def encode(self, rows: Tensor, scale: float = 1.0) -> Tensor:
        """Bytes uint8 [..., token_bytes] of rows [..., width]."""
        values = rows.detach().to(torch.float32).flatten(0, -2).numpy()
        tokens = torch.from_numpy(self.encode_rows(values, scale))
        return tokens.view(*rows.shape[:-1], self.token_bytes)

    def decode(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        """fp64 rows [..., width] of bytes uint8 [..., token_bytes]."""
        rows = self.decode_tokens(tokens.flatten(0, -2).numpy(), scale)
        return torch.from_numpy(rows).view(*tokens.shape[:-1], self.width)

    def array(self, pages: Tensor, block_size: int) -> Tensor:
        """The array, of its dtype and shape, of pages uint8 [blocks, bytes of a page]."""
        if self.form == "flat":
            return pages.clone()
        if self.form == "lanes":
            return pages.view(pages.shape[0], -1, block_size).clone()
        return pages.view(pages.shape[0], block_size, -1).view(getattr(torch, self.dtype)).clone()

    def pages(self, array: Tensor) -> Tensor:
        """uint8 [blocks, bytes of a page] of an array of this layout."""
        return array.contiguous().flatten(1).view(torch.uint8).clone()

    def put(self, pages: Tensor, block_size: int, slots: Tensor, tokens: Tensor) -> None:
        """Writes tokens uint8 [n, token_bytes] to slots [n] of pages; -1 writes nothing."""
        slots, tokens = slots[slots >= 0], tokens[slots >= 0]
        table = torch.tensor(self.offsets(block_size))
        pages[(slots // block_size).unsqueeze(-1), table[slots % block_size]] = tokens

    def get(self, pages: Tensor, block_size: int, slots: Tensor) -> Tensor:
        """Tokens uint8 [n, token_bytes] of slots [n] within pages."""
        table = torch.tensor(self.offsets(block_size))
        where = table[slots % block_size]
        return pages[(slots // block_size).unsqueeze(-1), where]


@cache
def _offsets(layout: ByteLayout, block_size: int) -> Array:
    table = np.empty((block_size, layout.token_bytes), dtype=np.int64)
    for token in range(block_size):
        for i in range(layout.token_bytes):
            table[token, i] = layout.offset(i, token, block_size)
    table.setflags(write=False)
    return table


def _ds_mla(rows: Array, scale: float) -> Array:
    tiles = rows[:, :LATENT].reshape(len(rows), -1, _TILE)
    scales = 2.0 ** numbers.latent_scale_exponents(tiles)
    with np.errstate(invalid="ignore"):
        codes = numbers.e4m3_encode(tiles / scales[..., None], "e4m3fn").reshape(len(rows), -1)
    return np.concatenate((codes, numbers.bits_of_f32(scales), _bf16(rows[:, LATENT:], 1.0)), -1)


def _ds_mla_rows(tokens: Array, scale: float) -> Array:
    codes, scales, rope = np.split(tokens, (LATENT, LATENT + 4 * LATENT // _TILE), axis=-1)
    factors = np.repeat(numbers.f32_of_bits(scales), _TILE, axis=-1)
    return np.concatenate(
        (numbers.e4m3_decode(codes, "e4m3fn") * factors, _bf16_rows(rope, 1.0)), -1
    )


def _nvfp4(rows: Array, scale: float) -> Array:
    groups = rows[:, :LATENT].reshape(len(rows), -1, NVFP4_GROUP)
    bytes_ = numbers.least_e4m3(np.maximum(numbers.finite_amax(groups) / 6, 2.0**-9))
    codes = e2m1_encode(groups / numbers.e4m3_decode(bytes_, "e4m3fn")[..., None])
    stored = np.empty_like(bytes_)
    for s in range(bytes_.shape[-1]):
        stored[:, 8 * (s & 3) + (s >> 2)] = bytes_[:, s]
    rope = numbers.e4m3_encode(rows[:, LATENT:], "e4m3fn")
    return np.concatenate((pack_nibbles(codes.reshape(len(rows), -1)), rope, stored), -1)


def _nvfp4_rows(tokens: Array, scale: float) -> Array:
    codes, rope, stored = np.split(tokens, (LATENT // 2, LATENT // 2 + ROPE), axis=-1)
    factors = np.empty(stored.shape)
    for s in range(stored.shape[-1]):
        factors[:, s] = numbers.e4m3_decode(stored[:, 8 * (s & 3) + (s >> 2)], "e4m3fn")
    values = e2m1_decode(unpack_nibbles(codes)) * np.repeat(factors, NVFP4_GROUP, axis=-1)
    return np.concatenate((values, numbers.e4m3_decode(rope, "e4m3fn")), -1)


def _per_tensor(flavour: str) -> Codec:
    def tokens(rows: Array, scale: float) -> Array:
        # The quotient is an fp32 number before it is rounded to E4M3.
        with np.errstate(over="ignore", invalid="ignore"):
            return numbers.e4m3_encode(rows / np.float32(scale), flavour)

    def values(tokens: Array, scale: float) -> Array:
        return numbers.e4m3_decode(tokens, flavour) * float(np.float32(scale))

    return tokens, values


def _bf16(rows: Array, scale: float) -> Array:
    return np.ascontiguousarray(numbers.bf16_bits(rows).astype("<u2")).view(np.uint8)


def _bf16_rows(tokens: Array, scale: float) -> Array:
    return numbers.bf16_values(np.ascontiguousarray(tokens).view("<u2"))


def _index_key(form: str) -> Codec:
    def tokens(rows: Array, scale: float) -> Array:
        exponents = numbers.index_scale_exponents(rows)[:, None]
        if form == "ue8m0x4":
            stored = np.repeat(exponents + 127, 4, axis=-1).astype(np.uint8)
        elif form == "ue8m0":
            stored = np.zeros((len(rows), 4), dtype=np.uint8)
            stored[:, :1] = exponents + 127
        else:
            stored = numbers.bits_of_f32(2.0**exponents)
        with np.errstate(invalid="ignore"):
            codes = numbers.e4m3_encode(rows / 2.0**exponents, "e4m3fn")
        return np.concatenate((codes, stored), -1)

    def values(tokens: Array, scale: float) -> Array:
        stored = tokens[:, KEY:]
        factor: Array
        if form in ("ue8m0x4", "ue8m0"):
            first = stored[:, :1].astype(np.float64)
            factor = np.where(first == 0xFF, np.nan, 2.0 ** (first - 127))
        else:
            factor = numbers.f32_of_bits(stored)
        return numbers.e4m3_decode(tokens[:, :KEY], "e4m3fn") * factor

    return tokens, values


def _in_a_row(bytes_each: int) -> Callable[[int, int, int], int]:
    return lambda i, token, block_size: token * bytes_each + i


def _planar(i: int, token: int, block_size: int) -> int:
    """Values of all tokens, then the 4 scale bytes of all tokens."""
    return token * KEY + i if i < KEY else block_size * KEY + token * 4 + (i - KEY)


def _tiled16(i: int, token: int, block_size: int) -> int:
    """As planar, the values in tiles [16 tokens][16 bytes], 8 for each 16 tokens."""
    if i >= KEY:
        return _planar(i, token, block_size)
    tile = (token // _SQUARE) * (KEY // _SQUARE) + i // _SQUARE
    return tile * _SQUARE * _SQUARE + (token % _SQUARE) * _SQUARE + i % _SQUARE


def _lanes(i: int, token: int, block_size: int) -> int:
    """Byte 0 of all tokens, then byte 1 of all, and so on."""
    return i * block_size + token


_FP32: Codec = (
    lambda rows, scale: numbers.bits_of_f32(rows),
    lambda tokens, scale: numbers.f32_of_bits(tokens),
)
_ROW = LATENT + ROPE


def _latent(id: str, size: int, dtype: str, codec: Codec, scaled: bool = False) -> ByteLayout:
    return ByteLayout(
        id, "latent", _ROW, size, dtype, "rows", scaled, *codec, offset=_in_a_row(size)
    )


def _index(
    id: str,
    codec: Codec,
    offset: Callable[..., int],
    multiple: int = 1,
    form: Literal["flat", "lanes"] = "flat",
) -> ByteLayout:
    return ByteLayout(
        id, "index", KEY, KEY + 4, "uint8", form, False, *codec, offset=offset, multiple=multiple
    )


LATENT_LAYOUTS: Mapping[str, ByteLayout] = MappingProxyType(
    {
        layout.id: layout
        for layout in (
            _latent("fp8_ds_mla", 656, "uint8", (_ds_mla, _ds_mla_rows)),
            _latent("e4m3", 576, "uint8", _per_tensor("e4m3fn"), scaled=True),
            _latent("e4m3fnuz", 576, "uint8", _per_tensor("e4m3fnuz"), scaled=True),
            _latent("bf16", 1152, "bfloat16", (_bf16, _bf16_rows)),
            _latent("fp32", 2304, "float32", _FP32),
            _latent("nvfp4_ds_mla", 352, "uint8", (_nvfp4, _nvfp4_rows)),
        )
    }
)
INDEX_LAYOUTS: Mapping[str, ByteLayout] = MappingProxyType(
    {
        layout.id: layout
        for layout in (
            _index("planar_f32", _index_key("f32"), _planar),
            _index("planar_ue8m0x4", _index_key("ue8m0x4"), _planar),
            _index("tiled16_f32", _index_key("f32"), _tiled16, multiple=_SQUARE),
            _index("lane33_ue8m0", _index_key("ue8m0"), _lanes, multiple=_LANES, form="lanes"),
            ByteLayout(
                "fp32", "index", KEY, 4 * KEY, "float32", "rows", False, *_FP32, _in_a_row(4 * KEY)
            ),
        )
    }
)


def byte_layout(role: str, id: str) -> ByteLayout:
    """The layout of that role and id. Raises ``KeyError`` that names the known ones."""
    known = LATENT_LAYOUTS if role == "latent" else INDEX_LAYOUTS
    if id not in known:
        raise KeyError(f"the oracle has no {role} layout {id!r}; it knows {', '.join(known)}")
    return known[id]
