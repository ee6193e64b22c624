"""Declared compute variants: products whose input is quantised first, as a backend that declares
``act:<format>`` does in a session that is opened for it.

- ``fp8_block``: E4M3 in blocks of 128 along K, scale = max(amax, 1e-10) / 448
- ``fp8_tensor``: E4M3 with one such scale a row, so that a row doesn't depend on its batch
- ``mxfp4``: E2M1 in groups of 32 along K, scales by the rule ``even``
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ml4core_conformance.oracle.kv_numbers import finite_amax
from ml4core_conformance.oracle.numbers import (
    FP8_BLOCK,
    MXFP4_GROUP,
    block_amax,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    spread_blocks,
)
from ml4core_conformance.oracle.quantize import fp8_codes, fp8_scale, mxfp4_exponents

_NEAR = 2.0**-20
"""How near to a tie, as a share of the quotient, a division by reciprocal may fall on its other
side.
"""


class Quantized(NamedTuple):
    """fp64 [..., K] each.

    Attributes:
        value: what the codes stand for.
        step: distance between neighbouring codes there.
        near: whether the value lies so near to a tie that either neighbour is right.
    """

    value: Tensor
    step: Tensor
    near: Tensor


def quantize_activation(x: Tensor, format: str) -> Quantized:
    """``x`` fp64 [..., K] in one of the formats above."""
    data = x.numpy()
    if format == "mxfp4":
        exponents = np.repeat(mxfp4_exponents(data, "even"), MXFP4_GROUP, axis=-1)
        unit = np.ldexp(1.0, exponents)
        quotient = data / unit
        code = e2m1_decode(e2m1_encode(quotient))
        grid = np.where(np.abs(quotient) < 2, 0.5, np.where(np.abs(quotient) < 4, 1.0, 2.0))
    else:
        rows = data.reshape(-1, data.shape[-1])
        if format == "fp8_block":
            amax = block_amax(rows, 1, FP8_BLOCK)
            scale = spread_blocks(fp8_scale(amax), 1, FP8_BLOCK, rows.shape)
        else:
            scale = np.broadcast_to(fp8_scale(finite_amax(rows))[:, None], rows.shape)
        scale = scale.reshape(data.shape)
        unit = scale.astype(np.float64)
        quotient = data / unit
        code = e4m3_decode(fp8_codes(data, scale), "e4m3fn")
        exponent = np.maximum(np.frexp(np.abs(quotient))[1] - 1, -6)
        grid = np.ldexp(1.0, exponent - 3)
    distance = np.abs(np.abs(quotient - code) - grid / 2)
    near = distance <= _NEAR * np.abs(quotient)
    return Quantized(
        torch.from_numpy(code * unit), torch.from_numpy(grid * unit), torch.from_numpy(near)
    )
