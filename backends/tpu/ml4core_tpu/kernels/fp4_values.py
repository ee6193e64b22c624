"""FP4 matrices as checkpoints have them, decoded."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ml4core_tpu.kernels.fp4_experts import e2m1_values
from ml4core_tpu.kernels.numbers import e4m3_values, e8m0_values


def fp4_values(data: jax.Array, scale: jax.Array, multiplier: jax.Array | None) -> jax.Array:
    """fp32 [..., N, K] of bytes uint8 [..., N, K / 2], whose low nibble is the even column.

    Args:
        scale: uint8 [..., N, K / group]; E4M3 with a ``multiplier`` fp32 [..., N] (NVFP4), else
            E8M0 (MXFP4).
    """
    codes = jnp.stack((data & 0xF, data >> 4), -1).astype(jnp.int32)
    values = e2m1_values(codes).reshape(*data.shape[:-1], -1)
    group = values.shape[-1] // scale.shape[-1]
    if multiplier is None:
        factor = e8m0_values(scale.astype(jnp.int32))
    else:
        factor = e4m3_values(scale) * multiplier[..., None]
    return values * jnp.repeat(factor, group, -1)
