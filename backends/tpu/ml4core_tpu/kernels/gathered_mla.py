"""Attention over rows that XLA gathers: for caches whose rows no copy of whole tiles moves."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ml4core_tpu.kernels.index_scores import VALUES
from ml4core_tpu.kernels.numbers import NEG_INF, e4m3_values, e8m0_values
from ml4core_tpu.kernels.products import product_dtype
from ml4core_tpu.kernels.rows import Kind, Rows, taken_rows

_ROWS_TOGETHER = 16


def rows_of(kind: str, latent: int, rope: int) -> Rows:
    """The form of a latent cache. ``ValueError`` for a kind that there isn't."""
    kinds: dict[str, Kind] = {"tiles": "tiles", "e4m3": "e4m3", "wide": "wide"}
    if kind not in kinds:
        raise ValueError(f"there is no kind {kind!r} of latent caches; works: {', '.join(kinds)}")
    return Rows(kinds[kind], latent, rope)


@partial(jax.jit, static_argnames=("rows", "scale"))
def sparse_mla(
    q: jax.Array,
    parts: tuple[jax.Array, ...],
    cache_scale: jax.Array,
    slots: jax.Array,
    lens: jax.Array,
    *,
    rows: Rows,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """``q`` [T, N, W] over the first lens [T] of slots int32 [T, k]: out [T, N, L] in q's dtype and
    lse fp32 [T, N].
    """
    total = parts[0].shape[0] * rows.page(parts)
    factor = cache_scale[0] if rows.scaled else jnp.float32(1)
    k = slots.shape[1]
    dtype = product_dtype(q, parts[0])

    def attend(one: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query, row, length = one  # [N, W], [k], []
        valid = (row >= 0) & (row < total) & (jnp.arange(k) < length)
        keys = taken_rows(rows, parts, jnp.where(valid, row, 0))
        keys = jnp.where(valid[:, None], keys, 0.0).astype(dtype)
        scores = _product(query.astype(dtype), keys[:, : query.shape[1]].T) * (
            factor * jnp.float32(scale)
        )
        scores = jnp.where(valid, scores, NEG_INF)
        top = scores.max(-1, keepdims=True)
        base = jnp.where(top == NEG_INF, 0.0, top)
        weights = jnp.exp(scores - base)
        whole = weights.sum(-1, keepdims=True)
        values = keys[:, : rows.latent]
        out = _product(weights.astype(dtype), values) / jnp.where(whole == 0, 1.0, whole)
        return (out * factor).astype(query.dtype), (base + jnp.log(whole))[:, 0]

    out, lse = lax.map(attend, (q, slots, lens), batch_size=min(_ROWS_TOGETHER, q.shape[0]))
    return out, lse


@partial(jax.jit, static_argnames=("rows",))
def gather_rows(
    parts: tuple[jax.Array, ...], cache_scale: jax.Array, slots: jax.Array, *, rows: Rows
) -> jax.Array:
    """Rows fp32 [n, L + R] of slots int32 [n]; zeros where one lies outside of the cache."""
    valid = (slots >= 0) & (slots < parts[0].shape[0] * rows.page(parts))
    found = taken_rows(rows, parts, jnp.where(valid, slots, 0))
    found = found * cache_scale[0] if rows.scaled else found
    return jnp.where(valid[:, None], found, 0.0)


@jax.jit
def gather_keys(keys: jax.Array, slots: jax.Array) -> jax.Array:
    """Keys fp32 [n, 128] of slots int32 [n] of a cache uint8 [pages, 33, 4, page]."""
    pages, _, _, page = keys.shape
    valid = (slots >= 0) & (slots < pages * page)
    inside = jnp.where(valid, slots, 0)
    token = keys[inside // page, :, :, inside % page].reshape(len(slots), -1)
    scale = e8m0_values(token[:, VALUES].astype(jnp.int32))
    found = e4m3_values(token[:, :VALUES]) * scale[:, None]
    return jnp.where(valid[:, None], found, 0.0)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    exact = a.dtype == jnp.float32
    return jnp.matmul(
        a,
        b,
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
