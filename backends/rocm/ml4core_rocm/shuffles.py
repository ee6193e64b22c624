"""Byte orders in which AITER's experts read their weights. Values stay, places change.

A tile of a weight is what 16 lanes of a matrix instruction read: 16 rows of 16 bytes. Separated
gates keep [gate rows; up rows]; interleaved ones alternate 16 gate rows with 16 up rows, as the
kernels with FP8 activations read both at once.

    tiled            [N / 16][Kb / 32][2][16 rows][16 bytes]
    tiled gated      [I / 16][gate, up][Kb / 64][4][16 rows][16 bytes]
    scales           [N / 32][K / 256][4][16 rows][2 groups of 4][2 groups of 16 rows]
    scales gated     [I / 16][K / 256][4][16 rows][2 groups of 4][gate, up]

Each is a function of whole experts; AITER's own fill what pads them with what the memory held,
these with zeros, and zero codes of any scale are zero.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

LANES = 16
"""Rows, and bytes, of a tile."""

_SCALE_ROWS = 256
_SCALE_GROUPS = 8


def tiled(data: Tensor) -> Tensor:
    """Weights uint8 [..., N, Kb] in tiles, the same shape. ``ValueError`` where N is no multiple of
    16 or Kb none of 32.
    """
    _check(data, 32)
    rows, width = data.shape[-2:]
    tiles = data.reshape(-1, rows // LANES, LANES, width // 32, 2, LANES)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(data.shape).contiguous()


def untiled(data: Tensor) -> Tensor:
    """Weights of the bytes of ``tiled``."""
    _check(data, 32)
    rows, width = data.shape[-2:]
    tiles = data.reshape(-1, rows // LANES, width // 32, 2, LANES, LANES)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(data.shape).contiguous()


def tiled_gated(data: Tensor) -> Tensor:
    """Weights uint8 [E, 2I, Kb], gate rows first, with gates interleaved. ``ValueError`` where I is
    no multiple of 16 or Kb none of 64.
    """
    _check(data, 64, 2)
    experts, rows, width = data.shape
    tiles = data.reshape(experts, 2, rows // 32, LANES, width // 64, 4, LANES)
    return tiles.permute(0, 2, 1, 4, 5, 3, 6).reshape(data.shape).contiguous()


def untiled_gated(data: Tensor) -> Tensor:
    """Weights of the bytes of ``tiled_gated``."""
    _check(data, 64, 2)
    experts, rows, width = data.shape
    tiles = data.reshape(experts, rows // 32, 2, width // 64, 4, LANES, LANES)
    return tiles.permute(0, 2, 1, 5, 3, 4, 6).reshape(data.shape).contiguous()


def tiled_wide(data: Tensor) -> Tensor:
    """Weights uint8 [E, N, Kb] of the second product beside ``tiled_gated``: [N / 16][Kb / 64][4]
    [16 rows][16 bytes]. It is ``tiled`` where Kb is a multiple of 64.
    """
    _check(data, 64)
    return tiled(data)


def tiled_scales(scale: Tensor) -> Tensor:
    """e8m0 bytes uint8 [rows, groups] of all experts' rows, padded to multiples of 256 and 8."""
    padded = _padded(scale, _SCALE_ROWS)
    rows, groups = padded.shape
    tiles = padded.reshape(rows // 32, 2, LANES, groups // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(rows, groups).contiguous()


def untiled_scales(scale: Tensor, rows: int, groups: int) -> Tensor:
    """Scales [rows, groups] of the bytes of ``tiled_scales``."""
    padded_rows, padded_groups = scale.shape
    tiles = scale.reshape(padded_rows // 32, padded_groups // 8, 4, LANES, 2, 2)
    plain = tiles.permute(0, 5, 3, 1, 4, 2).reshape(padded_rows, padded_groups)
    return plain[:rows, :groups].contiguous()


def tiled_scales_gated(scale: Tensor, experts: int) -> Tensor:
    """e8m0 bytes uint8 [experts * 2I, groups], gate rows first, in the order of ``tiled_gated``."""
    _check_experts(scale, experts)
    padded = _padded(scale, 32)
    rows, groups = padded.shape
    tiles = padded.reshape(experts, 2, rows // experts // 32, LANES, groups // 8, 2, 4)
    return tiles.permute(0, 2, 4, 6, 3, 5, 1).reshape(rows, groups).contiguous()


def untiled_scales_gated(scale: Tensor, experts: int, groups: int) -> Tensor:
    """Scales [experts * 2I, groups] of the bytes of ``tiled_scales_gated``."""
    rows, padded_groups = scale.shape
    tiles = scale.reshape(experts, rows // experts // 32, padded_groups // 8, 4, LANES, 2, 2)
    plain = tiles.permute(0, 6, 1, 4, 2, 5, 3).reshape(rows, padded_groups)
    return plain[:, :groups].contiguous()


def tiled_scales_wide(scale: Tensor, experts: int) -> Tensor:
    """e8m0 bytes uint8 [experts * N, groups] of the second product, expert by expert."""
    _check_experts(scale, experts)
    padded = _padded(scale, 32)
    rows, groups = padded.shape
    tiles = padded.reshape(rows // 32, 2, LANES, groups // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(rows, groups).contiguous()


def _check_experts(scale: Tensor, experts: int) -> None:
    if scale.shape[0] % (experts * 32):
        raise ValueError(
            f"scales of {experts} experts with {scale.shape[0] / experts:g} rows each; their tiles "
            "take multiples of 32"
        )


def _padded(scale: Tensor, rows: int) -> Tensor:
    if scale.dim() != 2:
        raise ValueError(f"scales are [rows, groups]; these are {list(scale.shape)}")
    return F.pad(scale, (0, -scale.shape[1] % _SCALE_GROUPS, 0, -scale.shape[0] % rows))


def _check(data: Tensor, width: int, halves: int = 1) -> None:
    rows = LANES * halves
    if data.shape[-2] % rows or data.shape[-1] % width:
        raise ValueError(
            f"tiles take multiples of {rows} rows and {width} bytes; the weight has "
            f"{data.shape[-2]} rows of {data.shape[-1]} bytes"
        )
