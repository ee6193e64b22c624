"""Products whose operands have scales of 32 columns beside them."""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.fp8 import fp8_value
from ml4core_triton.kernels.numeric import e2m1, e8m0

SCALED_DOT = tl.constexpr(
    not triton.knobs.runtime.interpret
    or tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8)
)
"""Whether ``tl.dot_scaled`` is there: the interpreter has it from 3.8 on."""


@triton.jit
def _grouped_values(codes, scale, ROWS: tl.constexpr, K: tl.constexpr, FP4: tl.constexpr):
    """fp32 [ROWS, K] of codes uint8, two a byte if FP4, and e8m0 scales uint8 [ROWS, K / 32]."""
    if FP4:
        wide = codes.to(tl.int32)
        values = tl.reshape(tl.join(e2m1(wide), e2m1(wide >> 4)), (ROWS, K))
    else:
        values = fp8_value(codes, False)
    groups = tl.reshape(values, (ROWS, K // 32, 32)) * e8m0(scale.to(tl.int32))[:, :, None]
    return tl.reshape(groups, (ROWS, K))


@triton.jit
def scaled_dot(x, x_scale, w, w_scale, acc, FP4: tl.constexpr):
    """acc + x @ w^T in fp32 of x [M, K] in e2m1 or e4m3 and w [N, K] in e2m1, uint8 codes each, two
    a byte in e2m1, with e8m0 scales uint8 of 32 columns.
    """
    if SCALED_DOT and FP4:
        found = tl.dot_scaled(x, x_scale, "e2m1", tl.trans(w), w_scale, "e2m1", acc)
    elif SCALED_DOT:
        codes = x.to(tl.float8e4nv, bitcast=True)
        found = tl.dot_scaled(codes, x_scale, "e4m3", tl.trans(w), w_scale, "e2m1", acc)
    else:
        COLUMNS: tl.constexpr = 2 * w.shape[1]
        left = _grouped_values(x, x_scale, x.shape[0], COLUMNS, FP4)
        right = _grouped_values(w, w_scale, w.shape[0], COLUMNS, True)
        found = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    return found
