"""One step of softmax over a tile of keys, in the form that fills Hopper's matrix units.

Rows are 512 latents, all but FP8 rows of ``fp8_ds_mla`` as bf16, and 64 rope values. A tile of keys
is decoded once, into shared memory, and met twice: by queries, then by weights. Where a tile has
64 heads or more, eight warps share its scores as four by two. The compiler gives products in a
chain all warps along the queries, twice the work; so here the scores come out of a ``while`` that
runs once, which hides the chain. It also keeps weights in bf16 on their way through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ml4core_triton.kernels.fp8 import HALF_BIAS, decoded, fp8_value, moved
from ml4core_triton.kernels.latents import DS_MLA
from ml4core_triton.kernels.numeric import INTERPRETED, dot, narrow

LATENT, ROPE = 512, 64
"""Values of a row that these kernels are for."""

_LATENT = tl.constexpr(LATENT)
_ROPE = tl.constexpr(ROPE)
_GROUPS = tl.constexpr(4)
"""Of 128 values with one scale."""
_SCALES_AT = tl.constexpr(512)
_ROPE_AT = tl.constexpr(528)
_ONCE = tl.constexpr(1 << 30)
"""Above any number of keys."""


@triton.jit
def key_tile(
    rows, offsets, valid, KIND: tl.constexpr, BK: tl.constexpr, INTEGERS: tl.constexpr
):  # fmt: skip
    """Latents bf16 [BK, 512] of rows at ``offsets`` [BK], with their scales; 0 where not ``valid``.

    ``INTEGERS`` says how FP8 is decoded; the numbers are the same, but which latents of a row are
    NaN where one is.
    """
    column = tl.arange(0, _LATENT)
    stored = tl.load(rows + offsets[:, None] + column[None, :], mask=valid[:, None], other=0)
    if KIND == DS_MLA:
        place = (rows + offsets + _SCALES_AT).to(tl.pointer_type(tl.float32))
        group = tl.arange(0, _GROUPS)
        scale = tl.load(place[:, None] + group[None, :], mask=valid[:, None], other=0.0)
        wide: tl.constexpr = tl.float32 if INTERPRETED else tl.bfloat16
        if INTEGERS:
            values = moved(stored)
            if INTERPRETED:
                values = fp8_value(stored, False) * 8.673617379884035e-19
            else:
                values = values * tl.full((), HALF_BIAS, tl.bfloat16)
            scale = scale * HALF_BIAS
        else:
            values = decoded(stored, wide, False)
        grouped = tl.reshape(values, (BK, _GROUPS, 128)) * scale.to(wide)[:, :, None]
        tile = narrow(tl.reshape(grouped, (BK, _LATENT)), tl.bfloat16)
    else:
        tile = stored
    return tile


@triton.jit
def rope_rows(rows, offsets, valid, KIND: tl.constexpr, OPPOSED: tl.constexpr):
    """The rope parts bf16 [BK, 64] of the same rows; with ``OPPOSED`` each value's sign turned."""
    tail = tl.arange(0, _ROPE)
    if KIND == DS_MLA:
        place = (rows + offsets + _ROPE_AT).to(tl.pointer_type(tl.uint16))
    else:
        place = (rows + offsets + _LATENT).to(tl.pointer_type(tl.uint16))
    bits = tl.load(place[:, None] + tail[None, :], mask=valid[:, None], other=0)
    if OPPOSED:
        bits = bits ^ 0x8000
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def fetch_ahead(rows, offsets, KIND: tl.constexpr):
    """Asks for rows at ``offsets`` [BK] to be brought to the second-level cache."""
    if not INTERPRETED:
        size: tl.constexpr = 656 if KIND == DS_MLA else 576
        lines: tl.constexpr = 8 if KIND == DS_MLA else 16
        width: tl.constexpr = 128 if KIND == DS_MLA else 64
        inside = tl.minimum(tl.arange(0, lines) * width, size - 1)
        place = rows + offsets[:, None] + inside[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [place.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def scored(q_latent, q_rope, keys, opposed, seen, factor, top, total):
    """Weights and the factor that fades the sum so far, with the new state: what queries make of a
    tile. ``seen`` [queries or 1, BK] says which keys count.
    """
    # Not a sum: that would become a product in a chain.
    scores = dot(q_latent, tl.trans(keys), tl.zeros((q_latent.shape[0], keys.shape[0]), tl.float32))
    scores -= dot(q_rope, tl.trans(opposed), tl.zeros(scores.shape, tl.float32))
    scores = tl.where(seen, scores * factor, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Without a key so far, -inf less -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    return narrow(weights, tl.bfloat16), fade, new_top, total


@triton.jit
def tile_step(
    q_latent, q_rope, keys, opposed, seen, factor, top, total, summed, BH: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The state after a tile of keys: largest score, sum of weights, weighted sum of latents."""
    weights = tl.zeros((BH, BK), tl.bfloat16)
    fade = tl.zeros((BH,), tl.float32)
    left = tl.full((), BK, tl.int32)
    while left > 0:
        weights, fade, top, total = scored(
            q_latent, q_rope, keys, opposed, seen, factor, top, total
        )
        left -= _ONCE
    return top, total, dot(weights, keys, summed * fade[:, None])


@triton.jit
def key_major_step(
    q_latent, q_rope, keys, rope, seen, factor, top, total, summed, BH: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The same with keys as the left operand, for few heads: they are the columns, of which the
    matrix units take as few as eight, and no row of a product stands for a head that isn't there.

    ``q_latent`` [512, BH], ``q_rope`` [64, BH], ``rope`` as it is, ``seen`` [BK, 1], ``summed``
    [512, BH]. Here the ``while`` is for the keys: what a loop carries is read by the matrix units
    from shared memory, where a left operand that was computed would be held in registers, twice.
    """
    left = tl.full((), BK, tl.int32)
    while left > 0:
        scores = dot(keys, q_latent, tl.zeros((BK, BH), tl.float32))
        scores = dot(rope, q_rope, scores)
        scores = tl.where(seen, scores * factor, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[None, :])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 0)
        top = new_top
        summed = dot(tl.trans(keys), narrow(weights, tl.bfloat16), summed * fade[None, :])
        # Another value, or it would be no longer carried.
        keys = tl.zeros((BK, _LATENT), tl.bfloat16)
        rope = tl.zeros((BK, _ROPE), tl.bfloat16)
        left -= _ONCE
    return top, total, summed
