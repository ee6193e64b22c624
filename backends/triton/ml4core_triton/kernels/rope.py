"""``rope``: rotation by global position.

Rate model: 4 bytes an element of bf16; 64 heads of 64 dims at one row are 16 KB: a launch. A pair's
angle costs some 40 instructions, two in fp64, a row and not a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.angles import cos_sin
from ml4core_triton.kernels.numeric import narrow, next_power, widen


@triton.jit
def _rope_kernel(
    x, positions, inv_freq, out, N, x_row, x_head, magnitude,
    PAIRS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Grid (T, groups of heads). A pair's two dims are ``APART`` apart, pairs ``STEP``."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    fits = (head < N)[:, None] & (pair < PAIRS)[None, :]
    frequency = tl.load(inv_freq + pair, mask=pair < PAIRS, other=0.0)
    cos, sin = cos_sin(tl.load(positions + row), frequency)
    cos, sin = (cos * magnitude)[None, :], (sin * magnitude)[None, :]
    wide = head.to(tl.int64)[:, None]
    source = x + row * x_row + wide * x_head + (pair * STEP)[None, :]
    a = widen(tl.load(source, mask=fits, other=0.0))
    b = widen(tl.load(source + APART, mask=fits, other=0.0))
    target = out + (row * N + wide) * (2 * PAIRS) + (pair * STEP)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(target, narrow(a * cos - b * sin, dtype), mask=fits)
    tl.store(target + APART, narrow(a * sin + b * cos, dtype), mask=fits)


def rope(
    x: Tensor, positions: Tensor, inv_freq: Tensor, interleaved: bool, magnitude: float
) -> Tensor:
    """Rotates ``x`` [T, N, R] by ``positions`` [T] * ``inv_freq`` [R/2]. ``ValueError`` where the
    widths don't belong together.
    """
    rows, heads, width = x.shape
    if inv_freq.shape[-1] * 2 != width:
        raise ValueError(
            f"rope of width {width} needs {width // 2} frequencies, got {inv_freq.shape[-1]}"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        if x.stride(-1) != 1:
            x = x.contiguous()
        pairs = width // 2
        group = min(next_power(heads), max(1, 1024 // next_power(pairs)))
        _rope_kernel[(rows, triton.cdiv(heads, group))](
            x, positions.contiguous(), inv_freq.contiguous(), out, heads, x.stride(0), x.stride(1),
            float(magnitude), PAIRS=pairs, HEADS=group, BLOCK=next_power(pairs),
            STEP=2 if interleaved else 1, APART=1 if interleaved else pairs,
        )  # fmt: skip
    return out
