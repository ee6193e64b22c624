"""Where an expert's matrix lies: in the stack of the routed ones, or apart, as the shared one's."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_matrix(
    data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, N, K, scale_size,
    FORMAT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Data, scales and row scales of an expert's matrix [N, K]; expert E is the shared one."""
    STORED: tl.constexpr = 2 if FORMAT >= 4 else 1
    expert = expert.to(tl.int64)  # a stack may have more than 2**31 elements
    data += expert * N * (K // STORED)
    scale += expert * scale_size
    row_scale += expert * N
    if SHARED:  # noqa: SIM102 - one is known as the kernel is compiled, the other is not
        if expert == E:
            data, scale, row_scale = shared, shared_scale, shared_row_scale
    return data, scale, row_scale
