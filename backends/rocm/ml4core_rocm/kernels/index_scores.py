"""The arithmetic of index scores, which the paged and the ragged kernel share."""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_rocm.kernels.keys import quantised
from ml4core_rocm.kernels.numeric import decoded, dot, fp8, power_of_two, widen


@triton.jit
def operand(stored, KIND_FP32: tl.constexpr, FP8: tl.constexpr):
    """Codes or fp32 values as products take them: FP8, float16, which holds each E4M3 number, where
    the matrix units don't take e4m3fn, or fp32.
    """
    if KIND_FP32:
        found = stored
    elif FP8:
        found = fp8(stored, False)
    else:
        found = decoded(stored, tl.float16, False)
    return found


@triton.jit
def queries(
    q,
    weights,
    scale,
    row,
    fits,
    head,
    q_row_stride,
    q_head_stride,
    w_row_stride,
    D: tl.constexpr,
    BD: tl.constexpr,
    KIND_FP32: tl.constexpr,
    FP8: tl.constexpr,
):
    """Queries [BD, columns] as the scores see them, and the factor [columns] of each."""
    column = tl.arange(0, BD)
    place = q + row * q_row_stride + head * q_head_stride
    x = tl.load(
        place[:, None] + column[None, :], mask=fits[:, None] & (column < D)[None, :], other=0.0
    )
    x = widen(x)
    factor = tl.load(weights + row * w_row_stride + head, mask=fits, other=0.0) * scale
    if KIND_FP32:
        found = x
    else:
        codes, exponent = quantised(x)
        found = operand(codes, False, FP8)
        factor = factor * power_of_two(exponent)
    return tl.trans(found), factor


@triton.jit
def scored(keys, queries, factor, BK: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr):
    """Scores fp32 [BK, BR] of keys [BK, BD], their scales left out."""
    sums = dot(keys, queries, tl.zeros((BK, BR * BH), tl.float32))
    # Not maximum(), which would hide NaN.
    sums = tl.where(sums < 0.0, 0.0, sums) * factor[None, :]
    return tl.sum(tl.reshape(sums, (BK, BR, BH)), 2)
