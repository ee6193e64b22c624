"""E4M3 and E8M0 within programs: decoding, and encoding as caches hold it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

E4M3_MAX = 448.0
NEG_INF = float("-inf")

_AMAX_FLOOR = 1e-4
"""Least magnitude that the scale of an index key is made for."""
_MANTISSA = 23
_HALF_MIN_NORMAL = 0x400000  # 2**-127 as float32


def e4m3_bytes(x: jax.Array) -> jax.Array:
    """Bytes uint8 of fp32 ``x``: to nearest, ties to even; saturating, infinities too; NaN stays
    and is 0x7F.
    """
    code = lax.bitcast_convert_type(
        jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn), jnp.uint8
    )
    return jnp.where(jnp.isnan(x), jnp.uint8(0x7F), code)


def e4m3_values(code: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The values of bytes uint8; exact in bfloat16 and fp32."""
    return lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(dtype)


def e4m3_words(code: jax.Array) -> jax.Array:
    """fp32 of int32 ``code`` 0..255, by integer arithmetic: for bytes that were cut out of words.

    A denormal is its mantissa times 2**-9.
    """
    sign = (code & 0x80) << 24
    exponent = (code >> 3) & 0xF
    mantissa = code & 0x7
    normal = lax.bitcast_convert_type(
        ((exponent + 120) << _MANTISSA) | (mantissa << (_MANTISSA - 3)), jnp.float32
    )
    small = mantissa.astype(jnp.float32) * (2.0**-9)
    size = jnp.where(exponent == 0, small, normal)
    size = jnp.where((code & 0x7F) == 0x7F, jnp.float32(jnp.nan), size)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.int32) | sign, jnp.float32)


def index_exponents(x: jax.Array) -> jax.Array:
    """int32 [...] of fp32 ``x`` [..., D]: log2 of the scale of a key or a query,
    ``2**ceil(log2(max(amax, 1e-4) / 448))``. Values that aren't finite don't count.
    """
    size = jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)
    amax = jnp.maximum(size.max(-1), jnp.float32(_AMAX_FLOOR))
    # amax = m 2**e with 1 <= m < 2, and 448 = 1.75 2**8: the quotient rounds up to 2**(e - 8), or
    # to twice that where m is beyond 1.75. No division, so none that rounds.
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    exponent = (bits >> _MANTISSA) - 127
    beyond = (bits & ((1 << _MANTISSA) - 1)) > (3 << (_MANTISSA - 2))
    return exponent - 8 + beyond.astype(jnp.int32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """fp32 2**``exponent``, int32 within -126..127."""
    return lax.bitcast_convert_type((exponent + 127) << _MANTISSA, jnp.float32)


def e8m0_values(code: jax.Array) -> jax.Array:
    """fp32 of int32 codes 0..255: 2**(code - 127); 255 is NaN."""
    bits = jnp.where(code == 0, _HALF_MIN_NORMAL, code << _MANTISSA)
    value = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(code == 255, jnp.float32(jnp.nan), value)
