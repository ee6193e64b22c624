"""One step of softmax over a block of keys, which the kernels of latent attention share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ml4core_triton.kernels.fp8 import fp8_rounded
from ml4core_triton.kernels.latents import E4M3FNUZ, latent_tile, rope_tile
from ml4core_triton.kernels.numeric import INTERPRETED, dot, narrow

LOG2E = 1.4426950408889634
WEIGHT_SCALE = 128.0
"""What weights 0..1 are multiplied by before they become FP8: both flavours hold it, and weights
down to 2**-16 of the largest stay."""

_LN2 = tl.constexpr(0.6931471805599453)
_WEIGHT_SCALE = tl.constexpr(WEIGHT_SCALE)


def product_dtype(q: torch.Tensor, rows: torch.Tensor) -> torch.dtype:
    """What queries and keys meet in: bf16, unless one of them would lose by it."""
    wide = torch.float32 in (q.dtype, rows.dtype)
    return torch.float32 if wide else torch.bfloat16


@triton.jit
def attend_keys(
    q_latent,
    q_rope,
    rows,
    offsets,
    valid,
    visible,
    factor,
    top,
    total,
    out,
    KIND: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    BR: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    DTYPE: tl.constexpr,
    CODES: tl.constexpr,
):
    """The state after a block of keys at ``offsets`` [keys], of which ``valid`` ones exist.

    Queries [queries, BL] and [queries, BR] see the keys where ``visible`` [queries or 1, keys].
    ``factor``, one or [queries, 1], is the softmax scale in base 2, with that of a cache with one
    scale, and that of queries in FP8. The state is the largest score, the sum of weights, both
    [queries], and the weighted sum of latents; with ``CODES``, where FP8 meets FP8, the latter two
    are ``WEIGHT_SCALE`` times that.
    """
    keys = latent_tile(rows, offsets, valid, KIND, L, BK, BL, DTYPE, CODES)
    scores = dot(q_latent, tl.trans(keys), tl.zeros((BM, BK), tl.float32))
    if HAS_ROPE:
        rope = rope_tile(rows, offsets, valid, KIND, L, R, BR, DTYPE, CODES)
        scores = dot(q_rope, tl.trans(rope), scores)
    scores = tl.where(visible, scores * factor, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Without a key so far, -inf less -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    if CODES:
        rounded = fp8_rounded(weights * _WEIGHT_SCALE, KIND == E4M3FNUZ)
        # What is divided by in the end is the sum of the weights as they were multiplied.
        total = total * fade + tl.sum(rounded if INTERPRETED else rounded.to(tl.float32), 1)
        out = dot(rounded, keys, out * fade[:, None])
    else:
        total = total * fade + tl.sum(weights, 1)
        out = dot(narrow(weights, DTYPE), keys, out * fade[:, None])
    return new_top, total, out


@triton.jit
def finished(top, total, out, CODES: tl.constexpr):
    """out [queries, BL] and lse [queries], base e, of a state; 0 and -inf without keys."""
    some = total != 0.0  # NaN too
    sums = tl.where(some, total, 1.0)
    out = out / sums[:, None]
    if CODES:
        sums = sums / _WEIGHT_SCALE
    lse = tl.where(some, (top + tl.log2(sums)) * _LN2, float("-inf"))
    return out, lse
