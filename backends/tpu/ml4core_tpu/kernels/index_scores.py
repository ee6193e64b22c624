"""Scores of the lightning indexer over pages of keys that lie along the lanes.

A page is uint8 [33, 4, page]: byte i of a token's 132 is row i / 4, sublane i % 4. Bytes 0 to 127
are E4M3 values, byte 128 is the E8M0 scale, the rest zero. So a page is the transposed operand of
the product as it lies. The reference form of keys is fp32 [page, D].
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.grid import grid_of
from ml4core_tpu.kernels.numbers import (
    NEG_INF,
    e4m3_bytes,
    e4m3_values,
    e8m0_values,
    index_exponents,
    power_of_two,
)
from ml4core_tpu.kernels.products import dot
from ml4core_tpu.kernels.target import Target, compiler_params

VALUES = 128
_TOGETHER = 4  # bytes of a token in one 32-bit word
_QUERY_ROWS = 512


def _kernel(table, last, q, factors, page_block, out, *, heads: int):
    request, tile, j = (pl.program_id(axis) for axis in range(3))
    rows = out.shape[2]

    @pl.when(j <= last[request, tile])
    def _():
        block = page_block[0]
        if block.ndim == 3:
            page = block.shape[2]
            codes = block[: VALUES // _TOGETHER]
            keys = e4m3_values(codes).reshape(VALUES, page).astype(q.dtype)
            dots = dot(q[0, 0], keys, 0)
            words = block[VALUES // _TOGETHER :].astype(jnp.int32)[0]  # [4, page]
            scale = e8m0_values(words[:1])
        else:
            page = block.shape[0]
            dots = dot(q[0, 0], block, 1)
            scale = jnp.ones((1, page), jnp.float32)
        # Not by `maximum`, which may answer 0 to NaN: NaN has to be seen by who selects.
        weighed = jnp.where(dots < 0, 0.0, dots) * factors[0, 0]
        summed = weighed.reshape(rows, heads, page).sum(1)
        out[0, 0] = summed * scale

    @pl.when(j > last[request, tile])
    def _():
        out[...] = jnp.full_like(out, NEG_INF)


@partial(jax.jit, static_argnames=("max_rows", "scale", "target"))
def index_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    block_table: jax.Array,
    query_start: jax.Array,
    visible: jax.Array,
    *,
    max_rows: int,
    scale: float,
    target: Target,
) -> jax.Array:
    """Scores fp32 [T, S] of queries [T, Hi, D] with weights fp32 [T, Hi] over the pages of each
    row's request: -inf from ``visible`` [T] on. ``keys`` is uint8 [pages, 33, 4, page], where
    queries are quantised as keys are, or fp32 [pages, page, D], where nothing is.
    """
    count, heads, width = q.shape
    tiled = keys.ndim == 4
    page = keys.shape[-1] if tiled else keys.shape[1]
    requests, pages = block_table.shape
    wide = q.astype(jnp.float32)
    factors = weights * jnp.float32(scale)
    if tiled:
        exponents = index_exponents(wide)
        code = e4m3_bytes(wide * power_of_two(-exponents)[..., None])
        wide = e4m3_values(code, jnp.bfloat16)
        factors = weights * power_of_two(exponents) * jnp.float32(scale)
    grid = grid_of(query_start, count, max_rows)
    each = max(1, min(max_rows, _QUERY_ROWS // heads))
    tiles = -(-max_rows // each)
    short = tiles * each - max_rows
    cells = jnp.pad(grid.spread(wide), ((0, 0), (0, short), (0, 0), (0, 0)))
    cells = cells.reshape(requests, tiles, each * heads, width)
    weighed = jnp.pad(grid.spread(factors), ((0, 0), (0, short), (0, 0)))
    weighed = weighed.reshape(requests, tiles, each * heads, 1)
    ends = jnp.pad(grid.spread(jnp.clip(visible, 0, pages * page)), ((0, 0), (0, short)))
    last = (ends.reshape(requests, tiles, each).max(-1) + page - 1) // page - 1
    rest = keys.shape[1:]

    def page_at(r, t, j, table, last):
        return (table[r, jnp.minimum(j, jnp.maximum(last[r, t], 0))], *(0,) * len(rest))

    def row_block(n: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, each * heads, n), lambda r, t, j, *_: (r, t, 0, 0))

    scores = pl.pallas_call(
        partial(_kernel, heads=heads),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(requests, tiles, pages),
            in_specs=[row_block(width), row_block(1), pl.BlockSpec((1, *rest), page_at)],
            out_specs=pl.BlockSpec((1, 1, each, page), lambda r, t, j, *_: (r, t, 0, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((requests, tiles, each, pages * page), jnp.float32),
        cost_estimate=pl.CostEstimate(
            flops=2 * requests * tiles * each * heads * pages * page * width,
            transcendentals=0,
            bytes_accessed=requests
            * tiles
            * pages
            * page
            * (keys.nbytes // keys.shape[0] // page + 4 * each),
        ),
        name="index_scores",
        **compiler_params(target, "arbitrary", "arbitrary", "arbitrary"),
    )(jnp.clip(block_table, 0, keys.shape[0] - 1), last, cells, weighed, keys)
    scores = grid.collect(scores.reshape(requests, tiles * each, -1), NEG_INF)
    column = jnp.arange(pages * page, dtype=jnp.int32)
    return jnp.where(column < visible[:, None], scores, NEG_INF)
