"""What cases of numeric ops are made of: dtypes of activations, and weights in every format."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from ml4core.api import WEIGHT_FORMATS, Weight
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.numbers import e2m1_encode, e4m3_encode, pack_nibbles
from ml4core_conformance.oracle.quantize import QUANTIZERS

ACTIVATIONS: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp32": torch.float32}
)
"""Variants by the dtype of activations; each needs the word ``act:<name>``."""

QUANTIZED_ACTIVATIONS: tuple[tuple[str, str], ...] = (
    ("fp8_block", "fp8_block"),
    ("fp8_tensor", "fp8_tensor"),
    ("fp8_block", "mxfp4"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
)
"""Declared compute variants of products, as formats of the activation and of the weight.

A backend that declares ``act:fp8_block`` quantises the bf16 input of every product with a quantised
weight in a session that is opened with that word among its deployment's ``needs``; a session
without it doesn't.
"""

_INTEGERS = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 6.0])
"""What every format holds, apart from the sign."""


def needs(act: str, *words: str) -> frozenset[str]:
    return frozenset({f"act:{act}", *words})


def quantized(format: str, values: Tensor, rows_differ: bool = True) -> Weight:
    """A weight [..., N, K] in a format, near to these values.

    With ``rows_differ`` the second half of an NVFP4 matrix' rows has another global scale.
    """
    parts = {
        name: torch.from_numpy(np.array(part))
        for name, part in QUANTIZERS[format](values.to(torch.float64).numpy(), None).items()
        if part.dtype != np.uint16
    }
    if format == "bf16":
        parts = {"data": values.to(torch.bfloat16)}
    if format == "nvfp4" and rows_differ:
        rows = parts["global_scale"]
        rows[..., rows.shape[-1] // 2 :] *= 0.375
    return Weight(format, tuple(values.shape), parts)


def integers(format: str, draw: Draw, *shape: int) -> Weight:
    """A weight of whole numbers up to 6, each exact, whose scales are powers of two that cancel."""
    data = _INTEGERS[draw.integers(*shape, high=len(_INTEGERS)).numpy()]
    data = np.where(draw.integers(*shape, high=2).numpy() == 0, data, -data)
    matrices, (rows, columns) = shape[:-2], shape[-2:]
    if format in ("fp32", "bf16"):
        dtype = torch.float32 if format == "fp32" else torch.bfloat16
        return Weight(format, shape, {"data": torch.from_numpy(data).to(dtype)})
    if format in ("fp8_block", "fp8_tensor"):
        blocks = (-(-rows // 128), -(-columns // 128)) if format == "fp8_block" else ()
        code = torch.from_numpy(e4m3_encode(data / 2, "e4m3fn"))
        return Weight(format, shape, {"data": code, "scale": torch.full((*matrices, *blocks), 2.0)})
    code = torch.from_numpy(pack_nibbles(e2m1_encode(data)))
    if format == "mxfp4":
        scale = torch.full((*matrices, rows, columns // 32), 127, dtype=torch.uint8)
        return Weight(format, shape, {"data": code, "scale": scale})
    eight = int(e4m3_encode(np.array(8.0), "e4m3fn"))
    parts = {
        "data": code,
        "scale": torch.full((*matrices, rows, columns // 16), eight, dtype=torch.uint8),
        "global_scale": torch.full((*matrices, rows), 0.125),
    }
    return Weight(format, shape, parts)


def small_integers(draw: Draw, *shape: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers of -8..8."""
    return draw.integers(*shape, low=-8, high=9).to(dtype)


def strided(x: Tensor, before: int = 5, behind: int = 3) -> Tensor:
    """The same values as a slice of a wider array along the last axis."""
    wide = x.new_full((*x.shape[:-1], before + x.shape[-1] + behind), torch.nan)
    wide[..., before : before + x.shape[-1]] = x
    return wide[..., before : before + x.shape[-1]]


__all__ = [
    "ACTIVATIONS",
    "QUANTIZED_ACTIVATIONS",
    "WEIGHT_FORMATS",
    "integers",
    "needs",
    "quantized",
    "small_integers",
    "strided",
]
