"""Quantisers, byte for byte.

A block's amax ignores what is not finite; divisions are those of fp32, rounded to nearest; codes
are rounded to nearest, ties to even, and saturate. Rules:

- ``fp8_block``: scale = max(amax, 1e-10) / 448 of 128 x 128 values; ``pow2``: the least power of
  two that is not below it
- ``fp8_tensor``: the same of each matrix
- ``nvfp4``: global = amax / 2688 of a matrix (1 if that is zero); a group's scale is the E4M3 of
  (amax / 6) / global, at least its least denormal; code = x / (scale * global)
- ``mxfp4``: scale exponent of 32 values by rule, clamped to -127..127: ``floor`` floor(log2 amax)
  - 2; ``even`` one more from a fraction of 1.75; ``roundup`` ceil(log2(amax / 6)); ``ceil``
  ceil(log2 amax) - 2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ml4core_conformance.oracle.expected import Exact, Expected
from ml4core_conformance.oracle.kv_numbers import bf16_bits, ceil_exponent, finite_amax
from ml4core_conformance.oracle.numbers import (
    FP8_BLOCK,
    MXFP4_GROUP,
    NVFP4_GROUP,
    Array,
    block_amax,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    pack_nibbles,
    spread_blocks,
    wide,
)

_FLOOR = np.float32(1e-10)
_LEAST_AMAX = np.float32(2.0**-64)


def quantize(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    x = wide(args["x"]).numpy()
    parts = QUANTIZERS[args["format"]](x, args.get("rule"))
    return Expected(
        {
            f"weight.{name}": Exact(torch.from_numpy(np.array(part)), ())
            if part.dtype != np.uint16
            else Exact(torch.from_numpy(part.view(np.int16)).view(torch.bfloat16), ())
            for name, part in parts.items()
        }
    )


def fp8_scale(amax: Array, pow2: bool = False) -> Array:
    """fp32 scales [...] of blocks of these largest magnitudes."""
    held = np.maximum(amax.astype(np.float32), _FLOOR)
    if not pow2:
        return np.asarray(held / np.float32(448), dtype=np.float32)
    exponents = [ceil_exponent(float(value), 448.0) for value in held.ravel()]
    return np.ldexp(np.float32(1), np.array(exponents, dtype=np.int32)).reshape(held.shape)


def fp8_codes(x: Array, scale: Array) -> Array:
    """E4M3 bytes of x / scale, the quotient in fp32."""
    with np.errstate(invalid="ignore", over="ignore"):
        return e4m3_encode(x.astype(np.float32) / scale.astype(np.float32), "e4m3fn")


def mxfp4_exponents(x: Array, rule: str) -> Array:
    """int64 [..., K/32] of x [..., K]: the exponents of the groups' scales; -127 for an empty one.

    Each rule is floor(log2 amax) - 2, one more from some fraction m = amax / 2**floor(log2 amax).
    """
    amax = finite_amax(x.reshape(*x.shape[:-1], -1, MXFP4_GROUP))
    fraction, exponent = np.frexp(amax)
    m, low = 2 * fraction, exponent - 1
    carries = {"floor": m >= 2, "even": m >= 1.75, "roundup": m > 1.5, "ceil": m > 1}[rule]
    found = np.clip(low - 2 + carries, -127, 127)
    return np.where(amax == 0, -127, found).astype(np.int64)


def _fp32(x: Array, rule: str | None) -> dict[str, Array]:
    return {"data": x.astype(np.float32)}


def _bf16(x: Array, rule: str | None) -> dict[str, Array]:
    narrow = x.astype(np.float32)
    bits = np.where(np.isnan(narrow), 0x7FC0, bf16_bits(np.nan_to_num(narrow, nan=0.0)))
    # Infinities have no bits to round; adding the half to the largest finite gives them.
    infinite = np.where(narrow > 0, 0x7F80, 0xFF80)
    return {"data": np.where(np.isinf(narrow), infinite, bits).astype(np.uint16)}


def _fp8_block(x: Array, rule: str | None) -> dict[str, Array]:
    scale = fp8_scale(block_amax(x, FP8_BLOCK, FP8_BLOCK), rule == "pow2")
    codes = fp8_codes(x, spread_blocks(scale, FP8_BLOCK, FP8_BLOCK, x.shape))
    return {"data": codes, "scale": scale}


def _fp8_tensor(x: Array, rule: str | None) -> dict[str, Array]:
    scale = fp8_scale(finite_amax(x.reshape(*x.shape[:-2], -1)))
    return {"data": fp8_codes(x, scale[..., None, None]), "scale": scale}


def _nvfp4(x: Array, rule: str | None) -> dict[str, Array]:
    amax = finite_amax(x.reshape(*x.shape[:-2], -1)).astype(np.float32)
    whole = np.where(amax > 0, np.maximum(amax, _LEAST_AMAX) / np.float32(2688), np.float32(1))
    whole = whole.astype(np.float32)[..., None, None]  # one a matrix
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, NVFP4_GROUP)
    top = finite_amax(groups).astype(np.float32)
    byte = e4m3_encode((top / np.float32(6)) / whole, "e4m3fn")
    byte = np.where(byte == 0, 1, byte).astype(np.uint8)
    factor = e4m3_decode(byte, "e4m3fn").astype(np.float32) * whole
    with np.errstate(invalid="ignore", over="ignore"):
        codes = e2m1_encode(groups / factor[..., None])
    rows = np.broadcast_to(whole[..., 0], x.shape[:-1])
    return {
        "data": pack_nibbles(codes.reshape(x.shape)),
        "scale": byte,
        "global_scale": rows.copy(),
    }


def _mxfp4(x: Array, rule: str | None) -> dict[str, Array]:
    exponents = mxfp4_exponents(x, rule or "even")
    groups = x.reshape(*x.shape[:-1], -1, MXFP4_GROUP)
    codes = e2m1_encode(np.ldexp(groups, -exponents[..., None]))
    return {
        "data": pack_nibbles(codes.reshape(x.shape)),
        "scale": (exponents + 127).astype(np.uint8),
    }


QUANTIZERS: Mapping[str, Callable[[Array, str | None], dict[str, Array]]] = MappingProxyType(
    {
        "fp32": _fp32,
        "bf16": _bf16,
        "fp8_block": _fp8_block,
        "fp8_tensor": _fp8_tensor,
        "nvfp4": _nvfp4,
        "mxfp4": _mxfp4,
    }
)
"""Format to ``(x fp64 [..., K], rule)`` -> arrays by name of part; uint16 are bfloat16's bits."""

ORACLE = MappingProxyType({"quantize": quantize})
