"""Formats of weights and activations, decoded to fp64 and encoded by their definitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core_conformance.oracle.kv_numbers import Array, e4m3_decode, e4m3_encode, finite_amax

FP8_BLOCK = 128
MXFP4_GROUP = 32
NVFP4_GROUP = 16

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""What bits 2..0 stand for; bit 3 is the sign."""


def wide(x: Tensor) -> Tensor:
    """fp64, on the CPU."""
    return x.detach().cpu().to(torch.float64)


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def half_ulp(x: Tensor) -> float:
    """What rounding to x's dtype may change, as a share of the value."""
    return {"float32": 2.0**-24, "bfloat16": 2.0**-8}[dtype_name(x)]


def decode_weight(weight: Weight) -> Tensor:
    """The values fp64 in the weight's logical shape."""
    parts = {name: part.detach().cpu() for name, part in weight.parts.items()}
    if weight.format in ("fp32", "bf16"):
        return wide(parts["data"])
    raw = {name: part.numpy() for name, part in parts.items()}
    return torch.from_numpy(np.ascontiguousarray(_DECODERS[weight.format](raw)))


def e2m1_encode(x: Array) -> Array:
    """Codes uint8 0..15 [...]: nearest, ties to the even code, saturating; NaN is +6."""
    size = np.minimum(np.abs(np.asarray(x, dtype=np.float64)), 6.0)
    above = np.clip(np.searchsorted(_E2M1, size), 1, 7)  # NaN sorts last
    middle = (_E2M1[above - 1] + _E2M1[above]) / 2
    up = np.isnan(size) | (size > middle) | ((size == middle) & (above % 2 == 0))
    code = np.where(up, above, above - 1)
    signed: Array = code | np.where(np.signbit(x) & ~np.isnan(x), 8, 0)
    return signed.astype(np.uint8)


def e2m1_decode(code: Array) -> Array:
    """fp64 [...] of codes 0..15 [...]."""
    values: Array = np.where(code & 8, -1.0, 1.0) * _E2M1[code & 7]
    return values


def e8m0_decode(byte: Array) -> Array:
    """fp64 [...]: 2**(byte - 127); 255 is NaN."""
    return np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(np.int64) - 127))


def pack_nibbles(code: Array) -> Array:
    """Bytes uint8 [..., K/2] of codes [..., K]: the low nibble is the even one."""
    packed: Array = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed.astype(np.uint8)


def unpack_nibbles(packed: Array) -> Array:
    """Codes uint8 [..., K] of bytes [..., K/2]."""
    return np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], -1)


def block_amax(x: Array, rows: int, columns: int) -> Array:
    """Largest finite magnitudes fp64 [..., ceil(N/rows), ceil(K/columns)] of x [..., N, K]."""
    n, k = x.shape[-2:]
    padded = np.zeros((*x.shape[:-2], -(-n // rows) * rows, -(-k // columns) * columns))
    padded[..., :n, :k] = x
    tiles = padded.reshape(*x.shape[:-2], -1, rows, padded.shape[-1] // columns, columns)
    tiles = np.moveaxis(tiles, -3, -2)  # [..., nb, kb, rows, columns]
    return finite_amax(tiles.reshape(*tiles.shape[:-2], -1))


def spread_blocks(scale: Array, rows: int, columns: int, shape: tuple[int, ...]) -> Array:
    """A number for each block as one for each element, of shape [..., N, K]."""
    full = np.repeat(np.repeat(scale, rows, axis=-2), columns, axis=-1)
    return full[..., : shape[-2], : shape[-1]]


def _fp8_block(raw: Mapping[str, Array]) -> Array:
    shape = raw["data"].shape
    scale = spread_blocks(raw["scale"].astype(np.float64), FP8_BLOCK, FP8_BLOCK, shape)
    values: Array = e4m3_decode(raw["data"], "e4m3fn") * scale
    return values


def _fp8_tensor(raw: Mapping[str, Array]) -> Array:
    matrices = raw["data"].shape[:-2]
    scale = raw["scale"].astype(np.float64).reshape(*matrices, 1, 1)
    values: Array = e4m3_decode(raw["data"], "e4m3fn") * scale
    return values


def _nvfp4(raw: Mapping[str, Array]) -> Array:
    local = np.repeat(e4m3_decode(raw["scale"], "e4m3fn"), NVFP4_GROUP, axis=-1)
    row = raw["global_scale"].astype(np.float64)[..., None]
    values: Array = e2m1_decode(unpack_nibbles(raw["data"])) * local * row
    return values


def _mxfp4(raw: Mapping[str, Array]) -> Array:
    scale = np.repeat(e8m0_decode(raw["scale"]), MXFP4_GROUP, axis=-1)
    values: Array = e2m1_decode(unpack_nibbles(raw["data"])) * scale
    return values


_DECODERS: Mapping[str, Callable[[Mapping[str, Array]], Array]] = MappingProxyType(
    {"fp8_block": _fp8_block, "fp8_tensor": _fp8_tensor, "nvfp4": _nvfp4, "mxfp4": _mxfp4}
)

__all__ = [
    "Array",
    "decode_weight",
    "dtype_name",
    "e4m3_decode",
    "e4m3_encode",
    "half_ulp",
    "wide",
]
