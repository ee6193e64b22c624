"""Index queries as codes, with their scales taken into the weights: what libraries' scores take."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.keys import quantised
from ml4core_triton.kernels.numeric import next_power, power_of_two, widen

_HEADS = 8


@triton.jit
def index_queries_kernel(
    q,
    weights,
    scale,
    codes,
    out,
    count,
    heads,
    q_row_stride,
    q_head_stride,
    w_row_stride,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program quantises ``ROWS`` heads, counted over all rows."""
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    fits = item < count
    row = (item // heads).to(tl.int64)
    head = item % heads
    column = tl.arange(0, BD)
    mask = fits[:, None] & (column < D)[None, :]
    place = q + (row * q_row_stride + head * q_head_stride)[:, None] + column[None, :]
    found, exponent = quantised(widen(tl.load(place, mask, other=0.0)))
    tl.store(codes + item.to(tl.int64)[:, None] * D + column[None, :], found, mask)
    weight = tl.load(weights + row * w_row_stride + head, fits, other=0.0)
    tl.store(out + item, weight * scale * power_of_two(exponent), fits)


def index_queries(q: Tensor, weights: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Codes uint8 e4m3fn [T, Hi, D] of queries [T, Hi, D], a scale a head, and fp32 [T, Hi]:
    weights [T, Hi] times ``scale`` and the codes' own.
    """
    rows, heads, width = q.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    codes = torch.empty(rows, heads, width, dtype=torch.uint8, device=q.device)
    out = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if out.numel():
        index_queries_kernel[(-(-rows * heads // _HEADS),)](
            q, weights, scale, codes, out, rows * heads, heads, q.stride(0), q.stride(1),
            weights.stride(0), D=width, BD=next_power(width), ROWS=_HEADS, num_warps=2,
        )  # fmt: skip
    return codes, out
