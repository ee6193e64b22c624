"""One step of softmax over a block of keys, which all kernels of latent attention share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ml4core_cuda.kernels.latents import latent_tile, rope_tile
from ml4core_cuda.kernels.numeric import dot, narrow

LOG2E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)


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
):
    """The state after a block of keys at ``offsets`` [keys], of which ``valid`` ones exist.

    Queries [queries, BL] and [queries, BR] see the keys where ``visible`` [queries or 1, keys].
    ``factor`` is the softmax scale in base 2, and that of a cache with one scale. The state is the
    largest score, the sum of weights, both [queries], and the weighted sum of latents.
    """
    keys = latent_tile(rows, offsets, valid, KIND, L, BK, BL, q_latent.dtype)
    scores = dot(q_latent, tl.trans(keys), tl.zeros((BM, BK), tl.float32))
    if HAS_ROPE:
        rope = rope_tile(rows, offsets, valid, KIND, L, R, BR, q_latent.dtype)
        scores = dot(q_rope, tl.trans(rope), scores)
    scores = tl.where(visible, scores * factor, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Without a key so far, -inf less -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    out = dot(narrow(weights, keys.dtype), keys, out * fade[:, None])
    return new_top, total, out


@triton.jit
def finished(top, total, out):
    """out [queries, BL] and lse [queries], base e, of a state; 0 and -inf without keys."""
    some = total != 0.0  # NaN too
    out = out / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * _LN2, float("-inf"))
    return out, lse
