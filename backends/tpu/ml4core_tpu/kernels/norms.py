"""Norms, the sum into the residual, and the Hadamard transform, as XLA's programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_HUGE = 2.0**40
"""Rows with larger values are normed at the scale ``_SHRINK``: their squares might overflow."""
_SHRINK = 2.0**-80


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis, in fp32, cast once to x's
    dtype.
    """
    wide = x.astype(jnp.float32)
    # Compared, as a maximum may answer 0 to NaN. A power of two: nothing is rounded by it.
    huge = (jnp.abs(wide) > _HUGE).any(-1, keepdims=True)
    shrink = jnp.where(huge, jnp.float32(_SHRINK), jnp.float32(1))
    wide = wide * shrink
    mean = jnp.mean(wide * wide, -1, keepdims=True)
    normed = wide * lax.rsqrt(mean + jnp.float32(eps) * (shrink * shrink))
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm over the last axis of ``x`` [..., D], fp32; weight and bias broadcast."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    # Again: what rounding left of a constant row would be blown up by 1 / sqrt(eps).
    centred = centred - centred.mean(-1, keepdims=True)
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return centred * lax.rsqrt(variance + jnp.float32(eps)) * weight + bias


def added(x: jax.Array, residual: jax.Array) -> jax.Array:
    """``residual + x``, added in fp32, in the residual's dtype."""
    return (residual.astype(jnp.float32) + x.astype(jnp.float32)).astype(residual.dtype)


def silu_mul(gate_up: jax.Array) -> jax.Array:
    """``silu(gate) * up`` [T, I] of [T, 2I], gate first, in fp32, cast once."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, -1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def hadamard(x: jax.Array) -> jax.Array:
    """``x`` [..., D] times H_D D^-0.5 in Sylvester's order; D is a power of two."""
    width = x.shape[-1]
    if width & (width - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, got width {width}")
    shape, half = x.shape, 1
    while half < width:
        pairs = x.reshape(*shape[:-1], width // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack((a + b, a - b), -2).reshape(shape)
        half *= 2
    return x * jnp.float32(width**-0.5)
