"""Declared compute variants: products whose input is quantised first, as a backend that declares
``act:<format>`` does in a session that is opened for it.

- ``fp8_block``: E4M3 in blocks of 128 along K, scale = max(amax, 1e-10) / 448
- ``fp8_tensor``: E4M3 with one such scale a row, so that a row doesn't depend on its batch
- ``mxfp4``: E2M1 in groups of 32 along K, scales by the rule ``even``
- ``nvfp4``: E2M1 in groups of 16 along K, as ``quantize`` makes them of a matrix of one row: the
  row's own global scale, so that it doesn't depend on its batch, and an E4M3 scale a group
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
    NVFP4_GROUP,
    Array,
    block_amax,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    spread_blocks,
)
from ml4core_conformance.oracle.quantize import (
    QUANTIZERS,
    fp8_codes,
    fp8_scale,
    mxfp4_exponents,
)

_NEAR = 2.0**-20
"""How near to a tie, as a share of the quotient, a division by reciprocal may fall on its other
side.
"""


class Quantized(NamedTuple):
    """fp64 [..., K] each.

    Attributes:
        value: what the codes stand for.
        step: distance between neighbouring codes there.
        near: whether the value lies so near to a tie that either neighbour is right. Of nvfp4 also
            where its group's scale lies near to one: there the step is what the other would move.
    """

    value: Tensor
    step: Tensor
    near: Tensor


def quantize_activation(x: Tensor, format: str, noise: float = _NEAR) -> Quantized:
    """``x`` fp64 [..., K] in one of the formats above. ``noise`` is how far, as a share, a group's
    largest value may be off: that moves scales which are not powers of two.
    """
    data = x.numpy()
    if format == "nvfp4":
        return _two_levels(data, noise)
    if format == "mxfp4":
        exponents = np.repeat(mxfp4_exponents(data, "even"), MXFP4_GROUP, axis=-1)
        unit = np.ldexp(1.0, exponents)
        quotient = data / unit
        code, grid = _fours(quotient)
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


def _fours(quotient: Array) -> tuple[Array, Array]:
    """The E2M1 value nearest to each number, and the distance of its neighbours there."""
    grid = np.where(np.abs(quotient) < 2, 0.5, np.where(np.abs(quotient) < 4, 1.0, 2.0))
    return e2m1_decode(e2m1_encode(quotient)), grid


def _two_levels(data: Array, noise: float) -> Quantized:
    rows = data.reshape(-1, 1, data.shape[-1])  # each a matrix of its own
    parts = QUANTIZERS["nvfp4"](rows, None)
    groups = rows.reshape(len(rows), -1, NVFP4_GROUP)
    whole = parts["global_scale"].astype(np.float64)
    byte = parts["scale"].reshape(len(rows), -1)

    def decoded(byte: Array) -> tuple[Array, Array, Array]:
        unit = (e4m3_decode(byte, "e4m3fn").astype(np.float32) * whole.astype(np.float32))[
            ..., None
        ]
        quotient = groups / unit.astype(np.float64)
        code, grid = _fours(quotient)
        distance = np.abs(np.abs(quotient - code) - grid / 2)
        return code * unit, grid * unit, distance <= _NEAR * np.abs(quotient)

    value, step, near = decoded(byte)
    wanted = finite_amax(groups) / 6 / whole
    for share in (1 - noise, 1 + noise):
        other = np.maximum(e4m3_encode(wanted * share, "e4m3fn"), 1)
        moved = (
            np.abs(decoded(other)[0] - value) + np.where(other != byte, 1.0, 0.0)[..., None] * step
        )
        step = np.where((other != byte)[..., None], np.maximum(step, moved), step)
        near = near | (other != byte)[..., None]
    shaped = (
        torch.from_numpy(np.ascontiguousarray(one.reshape(data.shape)))
        for one in (value, step, near)
    )
    return Quantized(*shaped)
