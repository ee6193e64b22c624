"""Writing rows into caches whose rows are not of whole tiles, by XLA's scatter."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ml4core_tpu.kernels.numbers import e4m3_bytes


@jax.jit
def write_rows(
    cache: jax.Array,
    cache_scale: jax.Array,
    slots: jax.Array,
    latent: jax.Array,
    rope: jax.Array | None,
) -> jax.Array:
    """The cache [pages, page, width] once rows of ``latent`` [T, L], then ``rope`` [T, R] (None:
    zeros) are written to slots int32 [T]. A slot outside of the cache writes nothing.

    The cache holds bits, so that what is there of another token passes as it is, NaN too: uint8 of
    E4M3 of the number over the scale, int16 of bfloat16, int32 of fp32.
    """
    pages, page, width = cache.shape
    row = latent.astype(jnp.float32)
    if rope is not None:
        row = jnp.concatenate((row, rope.astype(jnp.float32)), -1)
    row = jnp.pad(row, ((0, 0), (0, width - row.shape[1])))
    if cache.dtype == jnp.uint8:
        stored = e4m3_bytes(row / cache_scale[0])
    else:
        wide = row if cache.dtype == jnp.int32 else row.astype(jnp.bfloat16)
        stored = lax.bitcast_convert_type(wide, cache.dtype)
    valid = (slots >= 0) & (slots < pages * page)
    where = jnp.where(valid, slots // page, pages)  # beyond the last: dropped
    return cache.at[where, slots % page].set(stored, mode="drop")


_BITS: Mapping[str, Any] = MappingProxyType({"bfloat16": jnp.int16, "float32": jnp.int32})


def bits_of(cache: jax.Array) -> jax.Array:
    """A cache that a runtime holds as the numbers that it stores, as bits."""
    kind = _BITS.get(cache.dtype.name)
    return cache if kind is None else lax.bitcast_convert_type(cache, kind)


def numbers_of(bits: jax.Array, like: jax.Array) -> jax.Array:
    """Bits as the numbers that ``like`` has."""
    return bits if bits.dtype == like.dtype else lax.bitcast_convert_type(bits, like.dtype)


def write_numbers(cache: jax.Array, *given: Any) -> jax.Array:
    """``write_rows`` for a cache that a runtime holds as the numbers that it stores."""
    return numbers_of(write_rows(bits_of(cache), *given), cache)
