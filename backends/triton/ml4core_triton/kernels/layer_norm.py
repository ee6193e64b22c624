"""``layer_norm``: mean-subtracting, in fp32, as the indexer's query and key norms are.

Rate model: 6 bytes an element of bf16; 32 heads of 128 at one row are 25 KB: a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.numeric import next_power, rows_of, widen


@triton.jit
def row_moments(x, fits, width, eps):
    """Mean and 1 / sqrt(variance + eps) fp32 [ROWS] of rows fp32 [ROWS, BLOCK] where they fit."""
    mean = tl.sum(x, axis=1) / width
    centred = tl.where(fits, x - mean[:, None], 0.0)
    # Again: what rounding left in the mean of a constant row would be blown up by 1 / sqrt(eps).
    rest = tl.sum(centred, axis=1) / width
    centred = tl.where(fits, centred - rest[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / width
    return mean, rest, tl.div_rn(1.0, tl.sqrt_rn(variance + eps))


@triton.jit
def layer_normed(x, weight, bias, fits, width, eps):
    """LayerNorm of rows fp32 [ROWS, BLOCK], zeros where they don't fit; ``weight`` and ``bias``
    broadcast.
    """
    mean, rest, factor = row_moments(x, fits, width, eps)
    return normed_by(x, weight, bias, mean, rest, factor)


@triton.jit
def normed_by(x, weight, bias, mean, rest, factor):
    """Columns fp32 [ROWS, n] of rows of these moments [ROWS]."""
    centred = (x - mean[:, None]) - rest[:, None]
    return centred * factor[:, None] * weight + bias


@triton.jit
def _layer_norm_kernel(
    x, weight, bias, out, count, width, x_row, w_row, w_rows, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (groups of rows,). Row r takes row r % w_rows of weight and bias."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    fits = (row < count)[:, None] & (at < width)[None, :]
    wide = row.to(tl.int64)[:, None]
    value = widen(tl.load(x + wide * x_row + at[None, :], mask=fits, other=0.0))
    place = (row % w_rows)[:, None] * w_row + at[None, :]
    factor = widen(tl.load(weight + place, mask=fits, other=0.0))
    shift = widen(tl.load(bias + place, mask=fits, other=0.0))
    found = layer_normed(value, factor, shift, fits, width, eps)
    tl.store(out + wide * width + at[None, :], found, mask=fits)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis [..., D], fp32. Weight and bias are [D], or [N, D] for x
    [..., N, D].
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    x, width = rows_of(x), x.shape[-1]
    weight, bias = weight.contiguous(), bias.contiguous()
    block = next_power(width)
    group = max(1, 1024 // block)
    _layer_norm_kernel[(triton.cdiv(x.shape[0], group),)](
        x, weight, bias, out, x.shape[0], width, x.stride(0), width, weight.numel() // width, eps,
        ROWS=group, BLOCK=block,
    )  # fmt: skip
    return out
