"""A kernel that calls functions of a device, one of which calls another. Imports triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _sum_of_squares(x):
    return tl.sum(_square(x), 0)


@triton.jit
def sums_of_squares(x, out, WIDTH: tl.constexpr, FAIL: tl.constexpr):
    """Grid (rows,): of rows fp32 [rows, WIDTH], to out fp32 [rows]. Fails if it is told to."""
    row = tl.program_id(0)
    tl.static_assert(not FAIL, "not wanted")
    values = tl.load(x + row * WIDTH + tl.arange(0, WIDTH))
    tl.store(out + row, _sum_of_squares(values))
