"""FP8 in blocks: weights in 128 x 128 blocks, activations in 1 x 128 blocks.

A value is `code * scale`, whatever the checkpoint calls the scale (`..._scale_inv` multiplies too).
The last block of an axis may be ragged: 576 rows have 5 rows of scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.formats import e4m3, e8m0
from ml4core.formats.blocks import block_count, finite_amax, join_last, split_last
from ml4core.formats.exponent import ceil_exponent

BLOCK = 128
AMAX_FLOOR = 1e-10  # applied before division; keeps the scale of an empty block usable


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a weight [rows, columns]."""
    return block_count(rows, BLOCK), block_count(columns, BLOCK)


def block_scale(amax: Tensor, flavour: str, pow2: bool = False) -> Tensor:
    """float32 scales [...] of blocks whose largest magnitudes are `amax` [...].

    `max(amax, 1e-10) / quant_max`, or with `pow2` (UE8M0) the least power of two not below that.
    """
    limit = e4m3.flavour_of(flavour).quant_max
    amax = amax.to(torch.float32).clamp(min=AMAX_FLOOR)
    if pow2:
        return e8m0.pow2(ceil_exponent(amax, limit))
    # A tensor as divisor: some devices turn a division by a host number into a multiplication by
    # its reciprocal.
    return amax / torch.full((), limit, dtype=torch.float32, device=amax.device)


def quantize_weight(
    weight: Tensor, flavour: str = "e4m3fn", pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """Bytes uint8 and scales float32 [..., ceil(N/128), ceil(K/128)] of `weight` [..., N, K]."""
    rows, columns = weight.shape[-2:]
    blocks = split_last(weight.to(torch.float32), BLOCK)  # [..., N, kb, 128]
    row_amax = finite_amax(blocks).transpose(-1, -2)  # [..., kb, N]
    amax = finite_amax(split_last(row_amax, BLOCK)).transpose(-1, -2)  # [..., nb, kb]
    scale = block_scale(amax, flavour, pow2)
    code = e4m3.encode(blocks / _per_row(scale, rows), flavour)
    return join_last(code, columns), scale


def dequantize_weight(
    code: Tensor, scale: Tensor, flavour: str = "e4m3fn", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight [..., N, K] in `dtype` of E4M3 `code` [..., N, K] and its scales.

    Scales are [..., ceil(N/128), ceil(K/128)]. The product is formed in float32. ValueError if the
    shapes do not belong together.
    """
    rows, columns = code.shape[-2:]
    _check_scale(code, scale)
    blocks = split_last(e4m3.decode(code, flavour), BLOCK)
    return join_last(blocks * _per_row(scale, rows), columns).to(dtype)


def quantize_activation(
    x: Tensor, flavour: str = "e4m3fn", pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """Bytes uint8 [..., K] and float32 scales [..., ceil(K/128)] of `x` [..., K]."""
    blocks = split_last(x.to(torch.float32), BLOCK)
    scale = block_scale(finite_amax(blocks), flavour, pow2)
    code = e4m3.encode(blocks / scale.unsqueeze(-1), flavour)
    return join_last(code, x.shape[-1]), scale


def dequantize_activation(
    code: Tensor, scale: Tensor, flavour: str = "e4m3fn", dtype: torch.dtype = torch.float32
) -> Tensor:
    """The activation [..., K] in `dtype` of E4M3 `code` [..., K] and `scale` [..., ceil(K/128)]."""
    needed = block_count(code.shape[-1], BLOCK)
    if scale.shape[-1] != needed:
        raise ValueError(
            f"activation {list(code.shape)} needs {needed} scales a row, got {scale.shape[-1]}"
        )
    blocks = split_last(e4m3.decode(code, flavour), BLOCK)
    return join_last(blocks * scale.to(torch.float32).unsqueeze(-1), code.shape[-1]).to(dtype)


def weight_to_fnuz(code: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """An e4m3fn weight, bytes uint8 [...] and scales of any shape, as e4m3fnuz: the same values."""
    return e4m3.fn_to_fnuz(code), scale * 2


def _per_row(scale: Tensor, rows: int) -> Tensor:
    """Scales [..., nb, kb] as [..., rows, kb, 1]."""
    scale = scale.to(torch.float32).unsqueeze(-2).expand(*scale.shape[:-1], BLOCK, scale.shape[-1])
    return scale.flatten(-3, -2)[..., :rows, :].unsqueeze(-1)


def _check_scale(code: Tensor, scale: Tensor) -> None:
    needed = (*code.shape[:-2], *scale_shape(*code.shape[-2:]))
    if tuple(scale.shape) != needed:
        raise ValueError(
            f"weight {list(code.shape)} in {BLOCK} x {BLOCK} blocks needs scales {list(needed)}, "
            f"got {list(scale.shape)}"
        )
