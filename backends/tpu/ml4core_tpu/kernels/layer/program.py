"""The feed-forward half of a layer, and the whole of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ml4core_tpu.kernels.layer.attention import attention
from ml4core_tpu.kernels.layer.form import Caches, Chosen, Form, Step, Stored, Weights
from ml4core_tpu.kernels.layer.products import experts, gemm
from ml4core_tpu.kernels.moe import router
from ml4core_tpu.kernels.norms import added, rms_norm, silu_mul


def _block(form: Form, w: Weights, name: str, x: jax.Array) -> jax.Array:
    return gemm(form, silu_mul(gemm(form, x, w[f"{name}_w13"])), w[f"{name}_w2"])


def _mixture(form: Form, w: Weights, hidden: jax.Array) -> jax.Array:
    """Routed and shared experts, of this rank: a part of the sum over tensor ranks.

    Rows of all data ranks meet the experts of each, and go back as a sum.
    """
    moe, ranks = form.layer.moe, form.ranks
    assert moe is not None
    rows = ranks.gathered(hidden)
    weights, ids = router(
        rows,
        w["gate"],
        topk=moe.topk,
        renormalize=moe.renormalize,
        routed_scale=moe.routed_scale,
    )
    # A row that the router can't judge, such as one with NaN, becomes NaN: it would look right.
    weights = jnp.where((weights == 0).all(-1, keepdims=True), jnp.nan, weights)
    given = (w["experts_w13"], w["experts_w2"], weights, ids, w["first_expert"])
    out = ranks.scattered(experts(form, rows, *given, total=moe.experts))
    if moe.shared_width:
        shared = _block(form, w, "shared", hidden)
        out = (out.astype(jnp.float32) + shared.astype(jnp.float32)).astype(hidden.dtype)
    return out


def decoder_layer(
    form: Form,
    w: Weights,
    step: Step,
    caches: Caches,
    residual: jax.Array,
    hidden: jax.Array | None,
    chosen: Chosen | None,
    next_norm: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, Chosen | None, Stored]:
    """One layer on rows [T, H]: residual, hidden (None without ``next_norm``), the selection that
    it made (None if it made none), and the caches that it has written.
    """
    layer = form.layer
    residual, hidden, chosen, caches = attention(form, w, step, caches, residual, hidden, chosen)
    out = _block(form, w, "dense", hidden) if layer.moe is None else _mixture(form, w, hidden)
    residual = added(form.ranks.summed(out), residual)
    normed = None if next_norm is None else rms_norm(residual, next_norm, layer.norm_eps)
    stored = Stored(caches.latents if layer.owns_kv else (), caches.keys if layer.indexer else None)
    return residual, normed, chosen if layer.owns_index else None, stored
