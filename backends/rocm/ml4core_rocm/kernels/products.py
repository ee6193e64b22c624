"""The inner loop of every product with a weight.

FP8 meets FP8, and FP4 meets FP4 or FP8 with their e8m0 scales, in the matrix units where the
architecture has that; elsewhere, and beside plain activations, codes are decoded to bf16 without a
rounding. Each byte of the weight is read once for a tile of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_rocm.kernels.scaled_dot import scaled_dot
from ml4core_rocm.kernels.weight_tiles import fp4_tile, group_bytes, packed_tile, plain_tile
from ml4core_triton.kernels.fp8 import decoded, fp8
from ml4core_triton.kernels.numeric import dot, narrow, widen
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, MXFP4, NVFP4

PLAIN, BY_BLOCK, BY_ROW, GROUPS_FP4, GROUPS_FP8 = range(5)
"""What an activation is: numbers; e4m3 codes with a scale a row and 128 columns, or a row; e2m1 or
e4m3 codes with an e8m0 scale a row and 32 columns, which meet MXFP4 weights only."""

_BY_BLOCK, _GROUPS_FP4 = tl.constexpr(BY_BLOCK), tl.constexpr(GROUPS_FP4)
_FP8_BLOCK, _NVFP4, _MXFP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4), tl.constexpr(MXFP4)
_TILE = tl.constexpr(K_TILE)


@triton.jit
def _x_tile(
    x,
    rows,
    fits,
    k0,
    K,
    START: tl.constexpr,
    STEP: tl.constexpr,
    ACT: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
):
    """Columns k0 + START, + STEP, .. of the next 128 as [BM, 128 / STEP]; row offsets [BM]."""
    columns = k0 + START + STEP * tl.arange(0, _TILE // STEP)
    inside = (columns < K)[None, :] & fits[:, None]
    stored = tl.load(x + rows[:, None] + columns[None, :], mask=inside, other=0)
    if ACT == 0:
        found = stored if stored.dtype == WIDE else narrow(widen(stored), WIDE)
    elif CODES:
        found = fp8(stored, False)
    else:
        found = decoded(stored, WIDE, False)
    return found


@triton.jit
def _grouped(
    x,
    x_rows,
    x_fits,
    x_scale,
    scale_rows,
    data,
    scale,
    rows,
    row_fits,
    k0,
    K,
    acc,
    FP4: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """acc and the product of ``WIDTH`` columns, both operands with their e8m0 scales."""
    STORED: tl.constexpr = 2 if FP4 else 1
    byte = k0 // STORED + tl.arange(0, WIDTH // STORED)
    there = x_fits[:, None] & (byte < K // STORED)[None, :]
    left = tl.load(x + x_rows[:, None] + byte[None, :], mask=there, other=0)
    group = k0 // 32 + tl.arange(0, WIDTH // 32)
    there = x_fits[:, None] & (group < K // 32)[None, :]
    left_scale = tl.load(x_scale + scale_rows[:, None] + group[None, :], mask=there, other=0)
    right = packed_tile(data, rows, row_fits, k0, K, WIDTH)
    right_scale = group_bytes(scale, rows, row_fits, k0, K, 32, WIDTH)
    return scaled_dot(left, left_scale, right, right_scale, acc, FP4)


@triton.jit
def tile_sum(
    x,
    x_rows,
    x_fits,
    x_scale,
    scale_rows,
    data,
    scale,
    rows,
    row_fits,
    k_begin,
    k_end,
    K,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FORMAT: tl.constexpr,
    ACT: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    STEP: tl.constexpr,
):
    """fp32 [BM, BN]: activation rows [BM] times weight rows [BN] over columns k_begin .. k_end - 1.

    ``x_rows`` [BM] int64 are offsets of the activation's rows, ``scale_rows`` those of their
    scales. ``WIDE`` is what operands meet in, FP8 with ``CODES``. ``STEP`` columns are asked for at
    a time: 128, or more of them where scales go into the matrix units. What ``whole_scale`` gives,
    and scales a row of the activation, are left to the caller.
    """
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(k_begin, k_end, STEP):
        if ACT >= _GROUPS_FP4:
            acc = _grouped(
                x,
                x_rows,
                x_fits,
                x_scale,
                scale_rows,
                data,
                scale,
                rows,
                row_fits,
                k0,
                K,
                acc,
                ACT == _GROUPS_FP4,
                STEP,
            )
        else:
            each = acc if FORMAT != _FP8_BLOCK and ACT != _BY_BLOCK else tl.zeros_like(acc)
            if FORMAT >= _NVFP4:  # or MXFP4
                even, odd = fp4_tile(data, scale, rows, row_fits, k0, K, BN, FORMAT, WIDE)
                x_even = _x_tile(x, x_rows, x_fits, k0, K, 0, 2, ACT, WIDE, False)
                x_odd = _x_tile(x, x_rows, x_fits, k0, K, 1, 2, ACT, WIDE, False)
                each = dot(x_even, tl.trans(even), each)
                each = dot(x_odd, tl.trans(odd), each)
            else:
                tile = plain_tile(data, rows, row_fits, k0, K, FORMAT, WIDE, CODES)
                x_tile = _x_tile(x, x_rows, x_fits, k0, K, 0, 1, ACT, WIDE, CODES)
                each = dot(x_tile, tl.trans(tile), each)
            if FORMAT == _FP8_BLOCK:
                block = scale + (rows // _TILE).to(tl.int64) * tl.cdiv(K, _TILE) + k0 // _TILE
                each = each * tl.load(block, mask=row_fits, other=0.0)[None, :]
            if ACT == _BY_BLOCK:
                of_row = tl.load(x_scale + scale_rows + k0 // _TILE, mask=x_fits, other=0.0)
                each = each * of_row[:, None]
            acc = each if FORMAT != _FP8_BLOCK and ACT != _BY_BLOCK else acc + each
    return acc
