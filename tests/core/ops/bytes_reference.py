"""Cache pages written byte by byte from the words of each layout. Small and slow on purpose."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .references import e4m3_code, e4m3_value, finite_amax, power_of_two_at_least

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


def index_token(ue8m0: bool, copies: int = 4) -> Token:
    def token(row: Sequence[float], scale: float) -> bytes:
        own = index_scale(row)
        exponent = round(torch.log2(torch.tensor(own, dtype=torch.float64)).item())
        stored = bytes([exponent + 127] * copies + [0] * (4 - copies)) if ue8m0 else _fp32([own])
        return _codes(row, own, "e4m3fn") + stored

    return token


def nvfp4_ds_mla(latent: int) -> Token:
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def nibble(x: float) -> int:
        size = min(abs(x), 6.0) if x == x else 6.0
        # The nearest value, and of two the one with the even code.
        code = min(range(8), key=lambda c: (abs(values[c] - size), c % 2))
        return code | (8 if math.copysign(1.0, x) < 0 and x == x else 0)

    def token(row: Sequence[float], scale: float) -> bytes:
        codes, scales = [], []
        for start in range(0, latent, 16):
            group = row[start : start + 16]
            wanted = max(finite_amax(group) / 6, 2.0**-9)
            scales.append(
                min((b for b in range(0x7F) if e4m3_value(b, "e4m3fn") >= wanted), default=0x7E)
            )
            codes += [nibble(x / e4m3_value(scales[-1], "e4m3fn")) for x in group]
        packed = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
        order = [scales[s] for first in range(4) for s in range(first, len(scales), 4)]
        return packed + _codes(row[latent:], 1.0, "e4m3fn") + bytes(order)

    return token


def latent_token(id: str, latent: int) -> Token:
    return {
        "fp8_ds_mla": ds_mla(latent),
        "e4m3": lambda row, scale: _codes(row, scale, "e4m3fn"),
        "e4m3fnuz": lambda row, scale: _codes(row, scale, "e4m3fnuz"),
        "bf16": lambda row, scale: _bf16(row),
        "fp32": lambda row, scale: _fp32(row),
        "nvfp4_ds_mla": nvfp4_ds_mla(latent),
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


def lanes_offsets(width: int, block_size: int, token: int) -> list[int]:
    return [i * block_size + token for i in range(width)]


INDEX: dict[str, tuple[Token, Callable[[int, int, int], list[int]]]] = {
    "planar_f32": (index_token(False), planar_offsets),
    "planar_ue8m0x4": (index_token(True), planar_offsets),
    "tiled16_f32": (index_token(False), tiled16_offsets),
    "lane33_ue8m0": (index_token(True, copies=1), lanes_offsets),
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
