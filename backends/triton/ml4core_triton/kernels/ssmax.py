"""``ssmax``: the query's scale by global position.

Rate model: 4 bytes an element of bf16; one row costs a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import SSMaxSpec
from ml4core_triton.kernels.numeric import narrow, widen

NONE, LLAMA4, LOG, POW, FLOOR = range(5)
KINDS: Mapping[str, int] = MappingProxyType(
    {"none": NONE, "llama4": LLAMA4, "log": LOG, "pow": POW, "floor": FLOOR}
)
_LLAMA4, _LOG, _POW, _FLOOR = (tl.constexpr(one) for one in (LLAMA4, LOG, POW, FLOOR))


@triton.jit
def ssmax_factor(position, beta, origin, limit, KIND: tl.constexpr):
    """fp32 factor of int64 positions, before anything learned; ``limit`` caps the visible keys."""
    visible = tl.minimum(position + 1, limit)
    n = visible.to(tl.float32)
    if KIND == _LLAMA4:
        found = 1.0 + beta * tl.log(1.0 + ((visible - 1) // origin).to(tl.float32))
    elif KIND == _LOG:
        found = tl.log(n)
    elif KIND == _POW:
        found = tl.exp2(beta * tl.log2(1.0 + n / origin))
    elif KIND == _FLOOR:
        found = 1.0 + beta * tl.log(tl.maximum(n / origin, 1.0))
    else:
        found = n * 0.0 + 1.0
    return found


@triton.jit
def _ssmax_kernel(
    x, positions, scale, bias, out, N, D, x_row, x_head, beta, origin, limit, whole,
    KIND: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of the N D numbers of a row)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = at < N * D
    head = at // D
    factor = ssmax_factor(tl.load(positions + row), beta, origin, limit, KIND) * whole
    each = tl.zeros([BLOCK], tl.float32) + factor
    if SCALED:
        each = each * widen(tl.load(scale + head, mask=fits, other=0.0))
    if BIASED:
        each = each + widen(tl.load(bias + head, mask=fits, other=0.0))
    source = x + row * x_row + head.to(tl.int64) * x_head + at % D
    value = widen(tl.load(source, mask=fits, other=0.0)) * each
    tl.store(out + row * (N * D) + at, narrow(value, out.dtype.element_ty), mask=fits)


def ssmax(
    x: Tensor,
    positions: Tensor,
    spec: SSMaxSpec,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``x`` [T, N, D] times the factor of its position [T], for each head with ``scale`` [N].

    ``ValueError`` for an unknown kind, and for a bias that the kind has no use for.
    """
    if spec.kind not in KINDS:
        raise ValueError(f"unknown SSMax kind {spec.kind!r}; known: {', '.join(KINDS)}")
    if bias is not None and spec.kind != "log":
        raise ValueError(f"SSMax of kind {spec.kind!r} has no bias; only kind 'log' has")
    rows, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        if x.stride(-1) != 1:
            x = x.contiguous()
        _ssmax_kernel[(rows, triton.cdiv(heads * width, 1024))](
            x, positions.contiguous(), out if scale is None else scale.contiguous(),
            out if bias is None else bias.contiguous(), out, heads, width, x.stride(0), x.stride(1),
            float(spec.beta), spec.original_max_position,
            (1 << 62) if spec.n_limit is None else spec.n_limit,
            float(spec.scale) if spec.kind == "log" and scale is None else 1.0,
            KIND=KINDS[spec.kind], SCALED=scale is not None, BIASED=bias is not None, BLOCK=1024,
        )  # fmt: skip
    return out
