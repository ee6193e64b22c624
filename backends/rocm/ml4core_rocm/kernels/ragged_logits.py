"""Index scores of a prefill over gathered keys, in which each row sees a run of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_rocm.kernels.index_scores import operand, queries, scored
from ml4core_rocm.kernels.indexer_logits import COLUMNS, row_tile_of
from ml4core_rocm.kernels.numeric import next_power
from ml4core_rocm.kernels.target import fp8_products

_KEYS = 64


@triton.jit
def ragged_logits_kernel(
    q,
    weights,
    scale,
    codes,
    scales,
    starts,
    ends,
    scores,
    rows,
    columns,
    q_row_stride,
    q_head_stride,
    w_row_stride,
    Hi: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    FP8: tl.constexpr,
    FILL: tl.constexpr,
):
    """Grid (tiles of rows, tiles of keys). A tile that none of the rows sees is filled or left."""
    begin = tl.program_id(0) * BR
    each = begin + tl.arange(0, BR)
    real = each < rows
    start = tl.load(starts + each, real, other=0)
    end = tl.minimum(tl.load(ends + each, real, other=0), columns)
    position = tl.program_id(1) * BK + tl.arange(0, BK)
    sees = (position[:, None] >= start[None, :]) & (position[:, None] < end[None, :])
    known = tl.max(sees.to(tl.int32), 1) > 0
    out = scores + each.to(tl.int64)[None, :] * columns + position[:, None]
    written = real[None, :] & (position < columns)[:, None]
    if tl.max(known.to(tl.int32), 0) > 0:
        index = tl.arange(0, BR * BH)
        row = (begin + index // BH).to(tl.int64)
        head = index % BH
        right, factor = queries(
            q,
            weights,
            scale,
            row,
            (row < rows) & (head < Hi),
            head,
            q_row_stride,
            q_head_stride,
            w_row_stride,
            D,
            BD,
            False,
            FP8,
        )
        column = tl.arange(0, BD)
        place = codes + position.to(tl.int64)[:, None] * D + column[None, :]
        stored = tl.load(place, known[:, None] & (column < D)[None, :], other=0)
        found = scored(operand(stored, False, FP8), right, factor, BK, BR, BH)
        found = found * tl.load(scales + position, known, other=1.0)[:, None]
        tl.store(out, tl.where(sees, found, float("-inf")), written if FILL else written & sees)
    elif FILL:
        tl.store(out, tl.full((BK, BR), float("-inf"), tl.float32), written)


def ragged_logits(
    q: Tensor,
    weights: Tensor,
    scale: float,
    codes: Tensor,
    scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    fill: bool = True,
) -> Tensor:
    """Scores fp32 [T, S] of queries [T, Hi, D] with weights fp32 [T, Hi] over keys of codes uint8
    [S, D] and scales fp32 [S]; row t sees starts[t] to ends[t] - 1, int32 [T]. What it doesn't see
    is -inf, or without ``fill`` left as the memory was. ``ValueError`` for widths that differ.
    """
    rows, heads, width = q.shape
    columns = codes.shape[0]
    if codes.shape[1] != width:
        raise ValueError(f"queries have {width} values; these keys have {codes.shape[1]}")
    out = torch.empty(rows, columns, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    row_block, padded = row_tile_of(heads, rows, COLUMNS)
    ragged_logits_kernel[(-(-rows // row_block), -(-columns // _KEYS))](
        q,
        weights,
        scale,
        codes.contiguous(),
        scales.contiguous(),
        starts.contiguous(),
        ends.contiguous(),
        out,
        rows,
        columns,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        Hi=heads,
        BH=padded,
        BR=row_block,
        D=width,
        BD=max(16, next_power(width)),
        BK=_KEYS,
        FP8=fp8_products(q.device),
        FILL=fill,
        num_warps=4,
        num_stages=1,
    )
    return out
