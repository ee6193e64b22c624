"""Attention of absorbed queries over pages of their request: all visible keys, or a window of them.

A program is one page, met by the rows of one request. Pages outside of what the rows see are not
fetched: their program names the page before. Rows of a request may see the same keys, later ones
too, as ``visible`` is data: a drafter's block is such.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.grid import grid_of
from ml4core_tpu.kernels.numbers import NEG_INF
from ml4core_tpu.kernels.products import dot, product_dtype
from ml4core_tpu.kernels.rows import LANES, Rows, page_keys, page_specs
from ml4core_tpu.kernels.target import Target, compiler_params

_LEAST = -1e30
_QUERY_ROWS = 512
"""Rows times heads of a product."""


def _kernel(
    table,
    first,
    last,
    factor,
    starts,
    ends,
    q,
    *refs,
    rows: Rows,
    has_rope: bool,
    heads: int,
    page: int,
):
    if has_rope:
        q_rope, *blocks, out, lse, top, total, summed = refs
    else:
        *blocks, out, lse, top, total, summed = refs
    request, tile, j = (pl.program_id(axis) for axis in range(3))

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, _LEAST)
        total[...] = jnp.zeros_like(total)
        summed[...] = jnp.zeros_like(summed)

    @pl.when((j >= first[request, tile]) & (j <= last[request, tile]))
    def _():
        dtype = q.dtype
        latent, rope = page_keys(rows, [block[0] for block in blocks], has_rope, dtype)
        scores = dot(q[0, 0], latent, 1)  # [rows * N, page]
        if has_rope and rope is not None:
            scores += dot(q_rope[0, 0], rope, 1)
        column = j * page + lax.broadcasted_iota(jnp.int32, (1, page), 1)
        seen = (column >= starts[0, 0]) & (column < ends[0, 0])
        scores = jnp.where(seen, scores * factor[0], NEG_INF)
        before = top[...]
        peak = jnp.maximum(before, scores.max(-1, keepdims=True))
        fade = jnp.exp(before - peak)
        weights = jnp.exp(scores - peak)
        top[...] = peak
        total[...] = total[...] * fade + weights.sum(-1, keepdims=True)
        # A key that nobody may see can hold anything, and 0 * NaN is NaN. One that is seen and not
        # finite has shown up in the scores already.
        values = jnp.where(jnp.isfinite(latent.astype(jnp.float32)), latent, jnp.zeros_like(latent))
        summed[...] = summed[...] * fade + dot(weights.astype(dtype), values, 0)

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        some = ~(total[...] == 0)  # NaN is told, and isn't taken for a row without keys
        whole = jnp.where(some, total[...], 1.0)
        out[0, 0] = (summed[...] / whole * factor[1]).astype(out.dtype)
        lse[0, 0] = jnp.where(some, top[...] + jnp.log(whole), NEG_INF)


@partial(jax.jit, static_argnames=("rows", "max_rows", "scale", "window", "target"))
def window_mla(
    q: jax.Array,
    parts: tuple[jax.Array, ...],
    cache_scale: jax.Array,
    block_table: jax.Array,
    query_start: jax.Array,
    visible: jax.Array,
    *,
    rows: Rows,
    max_rows: int,
    scale: float,
    window: int | None,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """``q`` [T, N, W] over keys max(0, visible - window) .. visible - 1 of each row's request: out
    [T, N, L] in q's dtype and lse fp32 [T, N].
    """
    count, heads, width = q.shape
    page, latent = rows.page(parts), rows.latent
    has_rope = width > latent
    requests, pages = block_table.shape
    grid = grid_of(query_start, count, max_rows)
    ends = grid.spread(jnp.clip(visible, 0, pages * page))
    each = max(1, min(max_rows, _QUERY_ROWS // heads))
    tiles = -(-max_rows // each)
    ends = jnp.pad(ends, ((0, 0), (0, tiles * each - max_rows)))
    starts = jnp.zeros_like(ends) if window is None else jnp.maximum(ends - window, 0)
    sees = (ends > starts).reshape(requests, tiles, each)
    nearest = jnp.where(sees, starts.reshape(sees.shape), pages * page).min(-1)
    first = jnp.minimum(nearest // page, pages - 1)
    last = (jnp.where(sees, ends.reshape(sees.shape), 0).max(-1) + page - 1) // page - 1

    def cells(values: jax.Array) -> jax.Array:
        """[R, tiles, rows * N, n] of rows' [T, N, n]."""
        found = grid.spread(values)
        found = jnp.pad(found, ((0, 0), (0, tiles * each - max_rows), (0, 0), (0, 0)))
        return found.reshape(requests, tiles, each * heads, -1)

    def per_head(values: jax.Array) -> jax.Array:
        """[R, tiles, rows * N, 1] of [R, rows]."""
        found = values.reshape(requests, tiles, each, 1)
        return jnp.broadcast_to(found, (requests, tiles, each, heads)).reshape(
            requests, tiles, each * heads, 1
        )

    def row_block(n: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, each * heads, n), lambda r, t, j, *_: (r, t, 0, 0))

    wide = q.astype(product_dtype(q, parts[0]))
    operands, specs = [cells(wide[..., :latent])], [row_block(latent)]
    if has_rope:
        tail = wide[..., latent:]
        lanes = LANES if rows.kind == "tiles" else rows.rope
        tail = jnp.pad(tail, ((0, 0), (0, 0), (0, lanes - tail.shape[-1])))
        operands.append(cells(tail))
        specs.append(row_block(lanes))
    if rows.kind == "tiles" and not has_rope:
        parts = parts[:1]
    at = lambda r, t, j, table, first, last: table[  # noqa: E731
        r, jnp.clip(j, first[r, t], jnp.maximum(first[r, t], last[r, t]))
    ]
    k_scale = cache_scale[0] if rows.scaled else jnp.float32(1)
    blocks = parts[0].shape[0]
    out, lse = pl.pallas_call(
        partial(_kernel, rows=rows, has_rope=has_rope, heads=heads, page=page),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(requests, tiles, pages),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                row_block(1),
                row_block(1),
                *specs,
                *page_specs(rows, parts, has_rope, at),
            ],
            out_specs=[row_block(latent), row_block(1)],
            scratch_shapes=[
                pltpu.VMEM((each * heads, 1), jnp.float32),
                pltpu.VMEM((each * heads, 1), jnp.float32),
                pltpu.VMEM((each * heads, latent), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((requests, tiles, each * heads, latent), q.dtype),
            jax.ShapeDtypeStruct((requests, tiles, each * heads, 1), jnp.float32),
        ],
        cost_estimate=pl.CostEstimate(
            flops=4 * requests * tiles * each * heads * pages * page * (latent + rows.rope),
            transcendentals=requests * tiles * each * heads * pages * page,
            bytes_accessed=requests
            * tiles
            * (pages * sum(part.nbytes // blocks for part in parts) + each * heads * latent * 4),
        ),
        name="window_mla",
        **compiler_params(target, "arbitrary", "arbitrary", "arbitrary"),
    )(
        jnp.clip(block_table, 0, blocks - 1),
        first,
        last,
        jnp.stack((k_scale * jnp.float32(scale), k_scale)),
        per_head(starts),
        per_head(ends),
        *operands,
        *parts,
    )
    out = out.reshape(requests, tiles * each, heads, latent)
    lse = lse.reshape(requests, tiles * each, heads)
    return grid.collect(out, 0.0), grid.collect(lse, NEG_INF)
