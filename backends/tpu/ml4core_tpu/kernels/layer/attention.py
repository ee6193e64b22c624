"""The attention half of a layer: what it asks with, its writes, and what is attended."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ml4core_tpu.kernels import gathered_mla
from ml4core_tpu.kernels.cache_write import write_latents
from ml4core_tpu.kernels.layer.form import Caches, Chosen, Form, Step, Weights
from ml4core_tpu.kernels.layer.indexer import index_inputs, select
from ml4core_tpu.kernels.layer.products import gemm, head_gemm
from ml4core_tpu.kernels.layer.tiling import by_chunks, chunk_of, tile_rows, tiles_of
from ml4core_tpu.kernels.norms import added, rms_norm
from ml4core_tpu.kernels.positions import angles, rope, ssmax
from ml4core_tpu.kernels.row_write import write_rows
from ml4core_tpu.kernels.rows import LANES
from ml4core_tpu.kernels.sparse_mla import sparse_mla
from ml4core_tpu.kernels.window_mla import window_mla

_TABLE_BYTES = 512 << 10
"""Of the scalar memory, which is 1 MiB, for tables of the tiles that are there at once."""


class Inputs(NamedTuple):
    """Attributes:
    q: [T, N, W], absorbed.
    asked: index queries fp32 [T, Hi, D] and weights fp32 [T, Hi]; None without an indexer.
    """

    q: jax.Array
    asked: tuple[jax.Array, jax.Array] | None


def inputs(
    form: Form, w: Weights, step: Step, caches: Caches, hidden: jax.Array
) -> tuple[Inputs, Caches]:
    """What the layer asks with, and its caches once its own rows are written."""
    layer, eps = form.layer, form.layer.norm_eps
    turned = angles(step.positions, w["freq"]) if "freq" in w else None
    q_input = hidden
    if layer.q_lora_rank is None:
        q = gemm(form, hidden, w["wq"])
    else:
        q_input = rms_norm(gemm(form, hidden, w["wq_a"]), w["q_a_norm"], eps)
        q = gemm(form, q_input, w["wq_b"])
    q = q.reshape(hidden.shape[0], layer.heads, layer.q_dim)
    q_nope, q_pe = q[..., : layer.nope_dim], q[..., layer.nope_dim :]
    if layer.rope is not None and turned is not None:
        q_pe = rope(q_pe, *turned, layer.rope.interleaved)
    if layer.ssmax.kind != "none":
        learned = (w.get("ssmax_scale"), w.get("ssmax_bias"))
        q_nope = ssmax(q_nope, step.positions, layer.ssmax, *learned)
        if layer.rope_dim:
            q_pe = ssmax(q_pe, step.positions, layer.ssmax, *learned)
    if layer.owns_kv:
        row = gemm(form, hidden, w["wkv_a"])
        latent = rms_norm(row[:, : layer.kv_lora_rank], w["kv_a_norm"], eps)
        k_pe = row[:, layer.kv_lora_rank :]
        if layer.rope is not None and turned is not None:
            k_pe = rope(k_pe[:, None], *turned, layer.rope.interleaved)[:, 0]
        latents = _written(form, caches, step, latent, k_pe if layer.rope_dim else None)
        caches = caches._replace(latents=latents)
    asked = None
    if layer.indexer is not None:
        if caches.keys is None:
            raise ValueError("a layer that owns an indexer needs a cache of its keys")
        *found, keys = index_inputs(form, w, step, caches.keys, hidden, q_input, turned)
        asked, caches = (found[0], found[1]), caches._replace(keys=keys)
    q_latent = head_gemm(q_nope, w["w_uk"])
    absorbed = jnp.concatenate((q_latent, q_pe), -1) if layer.rope_dim else q_latent
    return Inputs(absorbed, asked), caches


def _written(
    form: Form, caches: Caches, step: Step, latent: jax.Array, tail: jax.Array | None
) -> tuple[jax.Array, ...]:
    given = (caches.scale, step.latent_slots, latent, tail)
    if form.latents.kind != "tiles":
        return (write_rows(caches.latents[0], *given),)
    ropes = caches.latents[1] if len(caches.latents) > 1 else None
    return write_latents(caches.latents[0], ropes, *given, target=form.target)


def values_of(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Parts of a cache as numbers, of those that are held as the bits of some."""
    kinds = {jnp.dtype(jnp.int16): jnp.bfloat16, jnp.dtype(jnp.int32): jnp.float32}
    return tuple(
        lax.bitcast_convert_type(part, kinds[part.dtype]) if part.dtype in kinds else part
        for part in parts
    )


def attend(
    form: Form, step: Step, caches: Caches, q: jax.Array, chosen: Chosen | None
) -> jax.Array:
    """[T, N, L] of absorbed queries, over what is chosen, or over all that a row sees."""
    rows, scale, target = form.latents, form.layer.softmax_scale, form.target
    parts = values_of(caches.latents)
    if chosen is None:
        return _attend_all(form, step, caches.scale, parts, q)
    if rows.kind == "tiles":
        ropes = parts[1] if len(parts) > 1 else None
        given = (q, parts[0], ropes, caches.scale, chosen.slots, chosen.lens)
        found = sparse_mla(*given, scale=scale, target=target)
    else:
        slots = (q, parts, caches.scale, chosen.slots, chosen.lens)
        found = gathered_mla.sparse_mla(*slots, rows=rows, scale=scale)
    return found[0]


def _attend_all(
    form: Form, step: Step, scale: jax.Array, parts: tuple[jax.Array, ...], q: jax.Array
) -> jax.Array:
    """The same over all that a row sees, for some rows at a time: tables of their tiles lie in the
    scalar memory.
    """
    requests, pages = step.latent_table.shape
    # Each tile has a row of the table, and its first and last page, all of whole lanes.
    line = 4 * LANES * (-(-pages // LANES) + 2)
    chunk = chunk_of(q.shape[0], requests, lambda tiles, each: tiles * line <= _TABLE_BYTES)
    each = tile_rows(chunk)

    def some(first: jax.Array) -> jax.Array:
        """Of ``chunk`` rows from ``first`` on."""
        mine, visible = (lax.dynamic_slice_in_dim(x, first, chunk) for x in (q, step.visible))
        starts = jnp.clip(step.query_start - first, 0, chunk)
        found = window_mla(
            mine,
            parts,
            scale,
            *tiles_of(step.latent_table, starts, chunk, each),
            visible,
            rows=form.latents,
            max_rows=each,
            scale=form.layer.softmax_scale,
            window=None,
            target=form.target,
        )
        return found[0]

    return by_chunks(some, q.shape[0], chunk)


def attention(
    form: Form,
    w: Weights,
    step: Step,
    caches: Caches,
    residual: jax.Array,
    hidden: jax.Array | None,
    chosen: Chosen | None,
) -> tuple[jax.Array, jax.Array, Chosen | None, Caches]:
    """From the layer's input to the norm before its feed-forward: residual and hidden [T, H], the
    selection, and the caches.
    """
    if hidden is None:
        hidden = rms_norm(residual, w["attention_norm"], form.layer.norm_eps)
    asks, caches = inputs(form, w, step, caches, hidden)
    if asks.asked is not None:
        chosen = select(form, step, caches, *asks.asked)
    out = attend(form, step, caches, asks.q, chosen)
    values = head_gemm(out, w["w_uv"])
    x = gemm(form, values.reshape(values.shape[0], -1), w["wo"])
    residual = added(form.ranks.summed(x), residual)
    return residual, rms_norm(residual, w["ffn_norm"], form.layer.norm_eps), chosen, caches
