"""The lightning indexer of a layer: its queries and keys, and the selection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ml4core_tpu.kernels.cache_write import write_index_keys
from ml4core_tpu.kernels.index_scores import index_scores
from ml4core_tpu.kernels.layer.form import Caches, Chosen, Form, Step, Weights
from ml4core_tpu.kernels.layer.products import gemm
from ml4core_tpu.kernels.layer.tiling import by_chunks, chunk_of, tile_rows, tiles_of
from ml4core_tpu.kernels.norms import hadamard, layer_norm
from ml4core_tpu.kernels.positions import rope, ssmax, to_slots
from ml4core_tpu.kernels.row_write import write_rows
from ml4core_tpu.kernels.topk import topk

_SCORE_BYTES = 256 << 20
"""Of the scores that are there at once, those of tiles without rows, too."""

Turned = tuple[jax.Array, jax.Array] | None


def index_inputs(
    form: Form,
    w: Weights,
    step: Step,
    keys: jax.Array,
    hidden: jax.Array,
    q_input: jax.Array,
    turned: Turned,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries fp32 [T, Hi, D], their weights fp32 [T, Hi], and the cache with the rows' keys.

    ``q_input`` is what queries of the main attention are made of; ``turned`` are cos and sin.
    """
    spec, fp32 = form.layer.indexer, jnp.dtype(jnp.float32)
    assert spec is not None
    source = hidden if spec.query_input == "hidden" else q_input
    q = gemm(form, source, w["index_wq"], fp32).reshape(-1, spec.heads, spec.head_dim)
    if spec.query_norm:
        q = layer_norm(q, w["index_q_norm_weight"], w["index_q_norm_bias"], spec.norm_eps)
    k = gemm(form, hidden, w["index_wk"], fp32)
    k = layer_norm(k, w["index_k_norm_weight"], w["index_k_norm_bias"], spec.norm_eps)
    weights = gemm(form, hidden, w["index_weights_proj"], fp32)

    def rotated(x: jax.Array) -> jax.Array:
        """The rotated values stand first here, last in the main attention."""
        assert turned is not None
        head = rope(x[..., : spec.rope_dim], *turned, spec.rope_interleaved)
        return jnp.concatenate((head, x[..., spec.rope_dim :]), -1)

    if spec.rope_dim:
        q, k = rotated(q), rotated(k[:, None])[:, 0]
    if spec.hadamard:
        q, k = hadamard(q), hadamard(k)
    if spec.ssmax.kind != "none":
        learned = (w.get("index_ssmax_scale"), w.get("index_ssmax_bias"))
        q = ssmax(q, step.positions, spec.ssmax, *learned)
    if keys.ndim == 4:
        written = write_index_keys(keys, step.index_slots, k, target=form.target)
    else:
        written = write_rows(keys, jnp.ones(1), step.index_slots, k, None)
    return q, weights, written


def select(form: Form, step: Step, caches: Caches, q: jax.Array, weights: jax.Array) -> Chosen:
    """The ``topk`` keys of each row with the largest scores, for some rows at a time."""
    spec, keys = form.layer.indexer, caches.keys
    assert spec is not None
    assert keys is not None
    page = keys.shape[-1] if keys.ndim == 4 else keys.shape[1]
    if keys.ndim == 3:
        keys = lax.bitcast_convert_type(keys, jnp.float32)
    rows, columns = q.shape[0], step.index_table.shape[1] * page
    requests = step.index_table.shape[0]

    def fits(tiles: int, each: int) -> bool:
        return tiles * each * columns * 4 <= _SCORE_BYTES

    chunk = chunk_of(rows, requests, fits)
    each = tile_rows(chunk)

    def some(first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of ``chunk`` rows from ``first`` on."""
        mine = [lax.dynamic_slice_in_dim(x, first, chunk) for x in (q, weights, step.visible)]
        starts = jnp.clip(step.query_start - first, 0, chunk)
        tiles = tiles_of(step.index_table, starts, chunk, each)
        scores = index_scores(
            *mine[:2], keys, *tiles, mine[2], max_rows=each, scale=spec.scale, target=form.target
        )
        return topk(scores, mine[2], k=spec.topk, target=form.target)

    positions, lens, has_nan = by_chunks(some, rows, chunk)
    latent_page = caches.latents[0].shape[1]
    slots = to_slots(positions, step.latent_table, step.request, latent_page)
    return Chosen(positions, lens, slots, has_nan)
