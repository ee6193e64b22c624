"""What core asks for between layers, on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.jit
def taken(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array[rows]


@jax.jit
def both(a: jax.Array, b: jax.Array) -> jax.Array:
    return a & b


@jax.jit
def either(a: jax.Array, b: jax.Array) -> jax.Array:
    return a | b


@jax.jit
def any_of(array: jax.Array, rows: jax.Array) -> jax.Array:
    """Whether one of the first ``rows`` is true."""
    return (array & (jnp.arange(array.shape[0]) < rows)).any()


@jax.jit
def side_by_side(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.concatenate(arrays, -1)
