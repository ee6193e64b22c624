"""What depends on a token's position: rotation, the scale of queries, and slots.

TPUs have no float64, and an angle in float32 is off by a turn's part that grows with the position.
So frequencies come as turns in fixed point: a position times them, of which whole turns fall off by
themselves, is an integer product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from ml4core.api import SSMaxSpec

_PI_DIGITS = "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899"
_TURN = 1 << 32


def turns(inv_freq: Sequence[float]) -> list[tuple[int, int]]:
    """Frequencies in radians a token as the fraction of a turn a token, in units of 2**-64: the
    upper and lower 32 bits of each, as signed integers.
    """
    around = 2 * Fraction(_PI_DIGITS)
    found = []
    for value in inv_freq:
        if not math.isfinite(value):
            raise ValueError(f"a rotary frequency is {value}")
        whole = round(Fraction(value) / around * (1 << 64)) % (1 << 64)
        found.append((_signed(whole >> 32), _signed(whole & (_TURN - 1))))
    return found


def _signed(word: int) -> int:
    return word - _TURN if word >= _TURN >> 1 else word


def angles(positions: jax.Array, freq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin fp32 [T, R / 2] of ``positions`` int32 [T] times ``freq`` int32 [2, R / 2], as
    ``turns`` has them.
    """
    place = positions.astype(jnp.uint32)[:, None]
    upper, lower = (lax.bitcast_convert_type(part, jnp.uint32) for part in (freq[0], freq[1]))
    phase = place * upper + _upper_half(place, lower)
    # The nearest quarter turn, and what is left of it: within an eighth of a turn.
    quarter = (phase + jnp.uint32(1 << 29)) >> 30
    left = lax.bitcast_convert_type(phase - (quarter << 30), jnp.int32)
    angle = left.astype(jnp.float32) * jnp.float32(2 * math.pi / _TURN)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    swap = (quarter & 1) == 1
    a, b = jnp.where(swap, sin, cos), jnp.where(swap, cos, sin)
    behind = (quarter == 1) | (quarter == 2)
    return jnp.where(behind, -a, a), jnp.where(quarter >= 2, -b, b)


def _upper_half(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the product of uint32 ``a`` and ``b``, by halves."""
    low = jnp.uint32(0xFFFF)
    al, ah, bl, bh = a & low, a >> 16, b & low, b >> 16
    middle = ah * bl + ((al * bl) >> 16)
    other = al * bh + (middle & low)
    return ah * bh + (middle >> 16) + (other >> 16)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool) -> jax.Array:
    """Rotates ``x`` [T, N, R] by ``cos`` and ``sin`` [T, R / 2]: pairs (2j, 2j + 1), or (j,
    j + R / 2).
    """
    wide = x.astype(jnp.float32)
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        pairs = wide.reshape(*wide.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)
    else:
        a, b = jnp.split(wide, 2, -1)
        turned = jnp.concatenate((a * cos - b * sin, a * sin + b * cos), -1)
    return turned.astype(x.dtype)


def ssmax(
    x: jax.Array,
    positions: jax.Array,
    spec: SSMaxSpec,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """``x`` [T, N, D] times the factor of its position int32 [T], for each head with ``scale``
    [N].
    """
    factor = _factor(positions, spec)[:, None]
    if scale is not None:
        factor = factor * scale.astype(jnp.float32)
    elif spec.kind == "log":
        factor = factor * jnp.float32(spec.scale)
    if bias is not None:
        factor = factor + bias.astype(jnp.float32)
    return (x.astype(jnp.float32) * factor[..., None]).astype(x.dtype)


def _factor(positions: jax.Array, spec: SSMaxSpec) -> jax.Array:
    """The kind's value fp32 [T], before anything learned."""
    visible = positions + 1
    if spec.n_limit is not None:
        visible = jnp.minimum(visible, spec.n_limit)
    n = visible.astype(jnp.float32)
    if spec.kind == "llama4":
        windows = (visible - 1) // spec.original_max_position
        return 1 + jnp.float32(spec.beta) * jnp.log1p(windows.astype(jnp.float32))
    if spec.kind == "log":
        return jnp.log(n)
    if spec.kind == "pow":
        return (1 + n / spec.original_max_position) ** jnp.float32(spec.beta)
    if spec.kind == "floor":
        return 1 + jnp.float32(spec.beta) * jnp.log(jnp.maximum(n / spec.original_max_position, 1))
    raise ValueError(f"SSMax of kind {spec.kind!r} has no factor; known: llama4, log, pow, floor")


def to_slots(
    positions: jax.Array, block_table: jax.Array, row_request: jax.Array, page: int
) -> jax.Array:
    """Slots int32 [T, k] of positions int32 [T, k] in the pages of each row's request; -1 stays."""
    pages = block_table.shape[1]
    inside = jnp.clip(positions, 0, pages * page - 1)
    ids = jnp.take_along_axis(block_table[row_request], inside // page, axis=1)
    return jnp.where(positions < 0, -1, ids * page + inside % page)
