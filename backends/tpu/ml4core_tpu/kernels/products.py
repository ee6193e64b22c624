"""Products within kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """``a`` [n, k] with axis ``axis`` of ``b``, of length k: fp32. fp32 operands stay fp32."""
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def product_dtype(q: jax.Array, keys: jax.Array) -> jnp.dtype:
    """What queries and keys of a cache meet in: fp32 where either is fp32, else bfloat16."""
    wide = jnp.float32 in (q.dtype, keys.dtype)
    return jnp.dtype(jnp.float32 if wide else jnp.bfloat16)
