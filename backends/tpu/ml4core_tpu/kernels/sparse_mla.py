"""Attention of absorbed queries over chosen rows of a tiled FP8 latent cache.

A program is one row of the step. Its keys come by one copy a row, 128 rows at a time, the next 128
while these are attended. What isn't to be attended is not copied, and its place in the buffer is
zeroed: it may hold the bytes of any NaN.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.numbers import NEG_INF, e4m3_words
from ml4core_tpu.kernels.products import dot
from ml4core_tpu.kernels.target import Target, compiler_params

LANES = 128
BLOCK = 128
"""Keys that are attended at a time."""
_LEAST = -1e30
"""Below every score: -inf less -inf would be NaN."""


def _copies(ids, latents, ropes, latent_buffer, rope_buffer, sems, page, block, place):
    """A function that goes over the rows of a block and starts, or waits for, their copies."""

    def each(act):
        def one(i, carry):
            row = ids[0, 0, block * BLOCK + i]

            @pl.when(row >= 0)
            def _():
                # Of numbers that aren't negative: `//` asks what the chip is.
                where, offset = lax.div(row, page), lax.rem(row, page)
                act(
                    pltpu.make_async_copy(
                        latents.at[where, offset], latent_buffer.at[place, i], sems.at[0, place]
                    )
                )
                if ropes is not None:
                    act(
                        pltpu.make_async_copy(
                            ropes.at[where, lax.div(offset, 4)],
                            rope_buffer.at[place, i],
                            sems.at[1, place],
                        )
                    )

            return carry

        lax.fori_loop(0, BLOCK, one, 0)

    return each


def _kernel(
    blocks,
    ids,
    mask_ids,
    factor,
    q,
    *refs,
    page: int,
    tiles: int,
    has_rope: bool,
    dtype: jnp.dtype,
):
    if has_rope:
        q_rope, latents, ropes, out, lse, latent_buffer, rope_buffer, sems, top, total, summed = (
            refs
        )
    else:
        latents, out, lse, latent_buffer, sems, top, total, summed = refs
        q_rope = ropes = rope_buffer = None
    count = blocks[pl.program_id(0)]
    softmax_factor, value_factor = factor[0], factor[1]
    top[...] = jnp.full_like(top, _LEAST)
    total[...] = jnp.zeros_like(total)
    summed[...] = jnp.zeros_like(summed)

    def copies(block, place):
        return _copies(ids, latents, ropes, latent_buffer, rope_buffer, sems, page, block, place)

    @pl.when(count > 0)
    def _():
        copies(0, 0)(lambda copy: copy.start())

    def attend(block, carry):
        place = block % 2

        @pl.when(block + 1 < count)
        def _():
            copies(block + 1, (block + 1) % 2)(lambda copy: copy.start())

        copies(block, place)(lambda copy: copy.wait())
        chosen = mask_ids[0, pl.ds(block, 1), :]  # [1, BLOCK]
        valid = chosen >= 0
        column = valid.astype(jnp.int32).reshape(BLOCK, 1, 1) > 0
        stored = pltpu.bitcast(latent_buffer[place], jnp.float8_e4m3fn)  # [BLOCK, tiles, 128]
        keys = jnp.where(column, stored.astype(jnp.float32), 0.0)
        keys = keys.reshape(BLOCK, tiles * LANES).astype(dtype)
        scores = dot(q[0], keys, 1)  # [N, BLOCK]
        if has_rope:
            words = pltpu.bitcast(rope_buffer[place], jnp.int32).reshape(BLOCK, LANES)
            shift = (chosen.reshape(BLOCK, 1) & 3) * 8
            rope = e4m3_words(lax.shift_right_logical(words, shift) & 0xFF)
            rope = jnp.where(column.reshape(BLOCK, 1), rope, 0.0).astype(dtype)
            scores += dot(q_rope[0], rope, 1)
        scores = jnp.where(valid, scores * softmax_factor, NEG_INF)
        before = top[...]
        peak = jnp.maximum(before, scores.max(-1, keepdims=True))
        fade = jnp.exp(before - peak)
        weights = jnp.exp(scores - peak)
        top[...] = peak
        total[...] = total[...] * fade + weights.sum(-1, keepdims=True)
        summed[...] = summed[...] * fade + dot(weights.astype(dtype), keys, 0)
        return carry

    lax.fori_loop(0, count, attend, 0)
    whole = total[...]
    some = ~(whole == 0)  # so that NaN is told, and isn't taken for a row without keys
    safe = jnp.where(some, whole, 1.0)
    out[0] = (summed[...] / safe * value_factor).astype(out.dtype)
    lse[0] = jnp.where(some, top[...] + jnp.log(safe), NEG_INF)


@partial(jax.jit, static_argnames=("scale", "target"))
def sparse_mla(
    q: jax.Array,
    latents: jax.Array,
    ropes: jax.Array | None,
    cache_scale: jax.Array,
    slots: jax.Array,
    lens: jax.Array,
    *,
    scale: float,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """``q`` [T, N, L or L + R] over the first lens [T] of slots int32 [T, k]: out [T, N, L] in q's
    dtype and lse fp32 [T, N].

    Args:
        latents: uint8 [pages, page, L / 128, 128].
        ropes: uint8 [pages, page / 4, 4, 128], 64 values and 64 zeros a token; None where queries
            have no rope part.
        cache_scale: fp32 [1], the scale of the whole cache.
    """
    pages, page, tiles, _ = latents.shape
    latent = tiles * LANES
    rows, heads, width = q.shape
    k = slots.shape[1]
    has_rope = width > latent
    if has_rope and ropes is None:
        raise ValueError(f"queries of {width} values need rope parts; latents have {latent}")
    valid = (slots >= 0) & (slots < pages * page) & (jnp.arange(k) < lens[:, None])
    ids = jnp.where(valid, slots, -1)
    short = -k % BLOCK
    ids = jnp.pad(ids, ((0, 0), (0, short)), constant_values=-1)
    blocks = (k + short) // BLOCK
    last = jnp.where(ids >= 0, jnp.arange(k + short) + 1, 0).max(-1)
    used = (last + BLOCK - 1) // BLOCK
    factor = jnp.stack((cache_scale[0] * jnp.float32(scale), cache_scale[0]))
    q_latent = q[..., :latent]
    operands = [q_latent]
    row = lambda *shape: pl.BlockSpec((1, *shape), lambda t, *_: (t, 0, 0))  # noqa: E731
    specs = [row(heads, latent)]
    scratch = [pltpu.VMEM((2, BLOCK, tiles, LANES), jnp.uint8)]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    if ropes is not None and has_rope:
        operands.append(jnp.pad(q[..., latent:], ((0, 0), (0, 0), (0, LANES - (width - latent)))))
        specs.append(row(heads, LANES))
        scratch.append(pltpu.VMEM((2, BLOCK, 4, LANES), jnp.uint8))
        operands += [latents, ropes]
        specs += [whole, whole]
    else:
        operands.append(latents)
        specs.append(whole)
    copied = BLOCK * blocks * (latent + (4 * LANES if has_rope else 0))
    out, lse = pl.pallas_call(
        partial(_kernel, page=page, tiles=tiles, has_rope=has_rope, dtype=q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=[
                pl.BlockSpec((1, 1, k + short), lambda t, *_: (t, 0, 0), memory_space=pltpu.SMEM),
                row(blocks, BLOCK),
                pl.BlockSpec(memory_space=pltpu.SMEM),
                *specs,
            ],
            out_specs=[row(heads, latent), row(heads, 1)],
            scratch_shapes=[
                *scratch,
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, latent), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, latent), q.dtype),
            jax.ShapeDtypeStruct((rows, heads, 1), jnp.float32),
        ],
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * heads * blocks * BLOCK * (2 * latent + LANES),
            transcendentals=rows * heads * blocks * BLOCK,
            bytes_accessed=rows * (copied + heads * latent * 4),
        ),
        name="sparse_mla",
        **compiler_params(target, "arbitrary"),
    )(
        used,
        ids[:, None],
        ids.reshape(rows, blocks, BLOCK),
        factor,
        *operands,
    )
    return out, lse[..., 0]
