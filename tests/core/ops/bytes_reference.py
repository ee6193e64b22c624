"""Cache pages written byte by byte from the words of each layout. Small and slow on purpose."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .references import e4m3_code, finite_amax, power_of_two_at_least

Token = Callable[[Sequence[float], float], bytes]


def _bf16(values: Sequence[float]) -> bytes:
    return bytes(torch.tensor(values).bfloat16().view(torch.uint8).tolist())


def _fp32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _codes(values: Sequence[float], scale: float, flavour: str) -> bytes:
    return bytes(e4m3_code(v / scale, flavour) for v in values)


def ds_mla(latent: int) -> Token:
    def token(row: Sequence[float], scale: float) -> bytes:
        codes, scales = b"", []
        for start in range(0, latent, 128):
            tile = row[start : start + 128]
            scales.append(power_of_two_at_least(max(finite_amax(tile) / 448, 1e-4)))
            codes += _codes(tile, scales[-1], "e4m3fn")
        return codes + _fp32(scales) + _bf16(row[latent:])

    return token


def index_scale(key: Sequence[float]) -> float:
    return power_of_two_at_least(max(finite_amax(key), 1e-4) / 448)


def index_token(ue8m0: bool) -> Token:
    def token(row: Sequence[float], scale: float) -> bytes:
        own = index_scale(row)
        exponent = round(torch.log2(torch.tensor(own, dtype=torch.float64)).item())
        stored = bytes([exponent + 127] * 4) if ue8m0 else _fp32([own])
        return _codes(row, own, "e4m3fn") + stored

    return token


def latent_token(id: str, latent: int) -> Token:
    return {
        "fp8_ds_mla": ds_mla(latent),
        "e4m3": lambda row, scale: _codes(row, scale, "e4m3fn"),
        "e4m3fnuz": lambda row, scale: _codes(row, scale, "e4m3fnuz"),
        "bf16": lambda row, scale: _bf16(row),
        "fp32": lambda row, scale: _fp32(row),
    }[id]


def row_offsets(width: int, block_size: int, token: int) -> list[int]:
    return [token * width + i for i in range(width)]


def planar_offsets(width: int, block_size: int, token: int) -> list[int]:
    """The key's bytes of all tokens, then the 4 scale bytes of all tokens."""
    key = width - 4
    values = [token * key + d for d in range(key)]
    return values + [block_size * key + 4 * token + i for i in range(4)]


def tiled16_offsets(width: int, block_size: int, token: int) -> list[int]:
    key = width - 4
    values = [token // 16 * 16 * key + d // 16 * 256 + token % 16 * 16 + d % 16 for d in range(key)]
    return values + [block_size * key + 4 * token + i for i in range(4)]


INDEX: dict[str, tuple[Token, Callable[[int, int, int], list[int]]]] = {
    "planar_f32": (index_token(False), planar_offsets),
    "planar_ue8m0x4": (index_token(True), planar_offsets),
    "tiled16_f32": (index_token(False), tiled16_offsets),
    "fp32": (lambda row, scale: _fp32(row), row_offsets),
}


def write_token(
    pages: list[bytearray], offsets: list[int], page: int, data: bytes
) -> list[bytearray]:
    for offset, byte in zip(offsets, data, strict=True):
        pages[page][offset] = byte
    return pages


def pages_of(array: Tensor) -> list[bytearray]:
    """The bytes of each page, without what lies between pages."""
    flat = array.reshape(array.shape[0], -1).contiguous().view(torch.uint8)
    return [bytearray(page) for page in flat.tolist()]
