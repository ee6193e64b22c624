"""Writing rows into tiled caches, in place: one token after the other, each by copies of whole
tiles.

A token's latent is a tile of its own. Its rope part shares a tile with three other tokens, and its
index key the lanes of a group of 128 tokens: these are read, changed and written back, and the next
token waits, as it may share them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.index_scores import VALUES
from ml4core_tpu.kernels.numbers import e4m3_bytes, index_exponents, power_of_two
from ml4core_tpu.kernels.rows import LANES, TOGETHER
from ml4core_tpu.kernels.target import Target, compiler_params

INDEX_GROUPS = 33
"""Groups of four bytes of an index key: 128 values, the scale, and three zeros."""


def _moved(source, destination, sem) -> None:
    copy = pltpu.make_async_copy(source, destination, sem)
    copy.start()
    copy.wait()


def _latent_kernel(slots, latent, *refs, page: int, slots_end: int):
    if len(refs) == 3:  # no rope part in this cache
        latents, sem = refs[1:]
        tail = ropes = buffer = None
    else:
        tail, _old, _olds, latents, ropes, buffer, sem = refs
    slot = slots[pl.program_id(0)]

    @pl.when((slot >= 0) & (slot < slots_end))
    def write() -> None:
        where, offset = lax.div(slot, page), lax.rem(slot, page)
        _moved(latent.at[0], latents.at[where, offset], sem)
        if ropes is not None and buffer is not None and tail is not None:
            tile = ropes.at[where, lax.div(offset, TOGETHER)]
            _moved(tile, buffer, sem)
            place = lax.broadcasted_iota(jnp.int32, (TOGETHER, LANES), 0)
            mine = place == lax.rem(offset, TOGETHER)
            row = jnp.broadcast_to(tail[0].astype(jnp.int32), (TOGETHER, LANES))
            buffer[...] = jnp.where(mine, row, buffer[...].astype(jnp.int32)).astype(jnp.uint8)
            _moved(buffer, tile, sem)


@partial(jax.jit, static_argnames=("target",))
def write_latents(
    latents: jax.Array,
    ropes: jax.Array | None,
    cache_scale: jax.Array,
    slots: jax.Array,
    latent: jax.Array,
    rope: jax.Array | None,
    *,
    target: Target,
) -> tuple[jax.Array, ...]:
    """The parts once ``latent`` [T, L] and ``rope`` [T, R] (None: zeros) are written to slots int32
    [T]. A slot outside of the cache writes nothing. The parts' own memory where it is donated.

    Args:
        latents: uint8 [pages, page, L / 128, 128].
        ropes: uint8 [pages, page / 4, 4, 128]; None where rows have no rope part.
        cache_scale: fp32 [1].
    """
    pages, page, tiles, _ = latents.shape
    rows = latent.shape[0]
    scale = cache_scale[0]
    code = e4m3_bytes(latent.astype(jnp.float32) / scale).reshape(rows, tiles, LANES)
    row = lambda *shape: pl.BlockSpec((1, *shape), lambda t, *_: (t, 0, 0))  # noqa: E731
    whole = pl.BlockSpec(memory_space=pl.ANY)
    operands, specs, caches = [code], [row(tiles, LANES)], [latents]
    scratch = [pltpu.SemaphoreType.DMA]
    if ropes is not None:
        tail = jnp.zeros((rows, 0), jnp.float32) if rope is None else rope.astype(jnp.float32)
        tail = jnp.pad(tail / scale, ((0, 0), (0, LANES - tail.shape[1])))
        operands.append(e4m3_bytes(tail).reshape(rows, 1, LANES))
        specs.append(row(1, LANES))
        caches.append(ropes)
        scratch.insert(0, pltpu.VMEM((TOGETHER, LANES), jnp.uint8))
    first = 1 + len(operands)  # the slots come before
    found = pl.pallas_call(
        partial(_latent_kernel, page=page, slots_end=pages * page),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=[*specs, *(whole for _ in caches)],
            out_specs=[whole for _ in caches],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(one.shape, one.dtype) for one in caches],
        input_output_aliases={first + i: i for i in range(len(caches))},
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=rows * (2 * tiles * LANES + 8 * LANES)
        ),
        name="write_latents",
        **compiler_params(target, "arbitrary"),
    )(slots, *operands, *caches)
    return tuple(found)


def _index_kernel(slots, key, _keys, keys, buffer, sem, *, page: int, slots_end: int):
    slot = slots[pl.program_id(0)]

    @pl.when((slot >= 0) & (slot < slots_end))
    def write() -> None:
        where, offset = lax.div(slot, page), lax.rem(slot, page)
        start = pl.multiple_of(lax.div(offset, LANES) * LANES, LANES)
        group = keys.at[where, :, :, pl.ds(start, LANES)]
        _moved(group, buffer, sem)
        lane = lax.broadcasted_iota(jnp.int32, buffer.shape, 2)
        mine = lane == lax.rem(offset, LANES)
        # Byte i of the key, as a column, stands in every lane.
        column = jnp.broadcast_to(key[0].astype(jnp.int32), buffer.shape)
        kept = buffer[...].astype(jnp.int32)
        buffer[...] = jnp.where(mine, column, kept).astype(jnp.uint8)
        _moved(buffer, group, sem)


@partial(jax.jit, static_argnames=("target",))
def write_index_keys(
    keys: jax.Array, slots: jax.Array, key: jax.Array, *, target: Target
) -> jax.Array:
    """The cache uint8 [pages, 33, 4, page] once ``key`` [T, 128] is written to slots int32 [T]. A
    slot outside of the cache writes nothing. Its own memory where it is donated.
    """
    pages, groups, _, page = keys.shape
    rows = key.shape[0]
    wide = key.astype(jnp.float32)
    exponents = index_exponents(wide)
    code = e4m3_bytes(wide * power_of_two(-exponents)[:, None])
    scale = (exponents + 127).astype(jnp.uint8)[:, None]
    short = jnp.zeros((rows, groups * TOGETHER - VALUES - 1), jnp.uint8)
    token = jnp.concatenate((code, scale, short), -1).reshape(rows, groups, TOGETHER, 1)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_index_kernel, page=page, slots_end=pages * page),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=[
                pl.BlockSpec((1, groups, TOGETHER, 1), lambda t, *_: (t, 0, 0, 0)),
                whole,
            ],
            out_specs=whole,
            scratch_shapes=[
                pltpu.VMEM((groups, TOGETHER, LANES), jnp.uint8),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(keys.shape, keys.dtype),
        input_output_aliases={2: 0},
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=rows * groups * TOGETHER * (2 * LANES + 1),
        ),
        name="write_index_keys",
        **compiler_params(target, "arbitrary"),
    )(slots, token, keys)
