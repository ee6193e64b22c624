"""Weights on their way to the second cache, while a launch waits for the one before it."""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.numeric import INTERPRETED

_LINE = tl.constexpr(128)
"""Bytes of a line of the second cache."""


@triton.jit
def prefetch_rows(data, rows, fits, K, SIZE: tl.constexpr, WANTED: tl.constexpr):
    """Asks for rows [BN] of a matrix [N, K] of ``SIZE`` bytes a number, those that ``fits``, if
    ``WANTED``. Reads nothing, and changes nothing that a program sees.
    """
    if WANTED and not INTERPRETED:
        size = K * SIZE
        line = tl.arange(0, 8)
        start = data.to(tl.int64) + tl.where(fits, rows, 0).to(tl.int64) * size
        for first in range(0, tl.cdiv(size, _LINE), 8):
            at = tl.minimum((first + line) * _LINE, size - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [start[:, None] + at[None, :]],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
