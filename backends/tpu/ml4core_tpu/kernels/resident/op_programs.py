"""The programs of ops on caches and weights that stay on devices. Those that write are donated the
cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ml4core_tpu.kernels import gathered_mla
from ml4core_tpu.kernels import sparse_mla as tiled
from ml4core_tpu.kernels import window_mla as paged
from ml4core_tpu.kernels.cache_write import write_index_keys, write_latents
from ml4core_tpu.kernels.index_scores import index_scores
from ml4core_tpu.kernels.layer import products
from ml4core_tpu.kernels.layer.attention import values_of
from ml4core_tpu.kernels.layer.form import Matrix
from ml4core_tpu.kernels.layer.mesh import TENSOR
from ml4core_tpu.kernels.resident.devices import WHOLE
from ml4core_tpu.kernels.row_write import write_rows
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.kernels.target import Target

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class ProductForm:
    """What products have to know: ``act`` is ``fp8_tensor`` where inputs of FP8 products are
    quantised, else "".
    """

    act: str
    target: Target


@partial(jax.jit, static_argnames=("rows", "scale", "target"))
def sparse_mla(
    q: jax.Array,
    parts: Arrays,
    factor: jax.Array,
    slots: jax.Array,
    lens: jax.Array,
    *,
    rows: Rows,
    scale: float,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    if rows.kind != "tiles":
        given = (q, values_of(parts), factor, slots, lens)
        return gathered_mla.sparse_mla(*given, rows=rows, scale=scale)
    ropes = parts[1] if len(parts) > 1 else None
    return tiled.sparse_mla(q, parts[0], ropes, factor, slots, lens, scale=scale, target=target)


@partial(jax.jit, static_argnames=("rows", "max_rows", "scale", "window", "target"))
def window_mla(
    q: jax.Array, parts: Arrays, *given: jax.Array, **static: Any
) -> tuple[jax.Array, jax.Array]:
    return paged.window_mla(q, values_of(parts), *given, **static)


@partial(jax.jit, static_argnames=("rows", "target"), donate_argnums=0)
def kv_write(
    parts: Arrays,
    factor: jax.Array,
    slots: jax.Array,
    latent: jax.Array,
    tail: jax.Array | None,
    *,
    rows: Rows,
    target: Target,
) -> Arrays:
    if rows.kind != "tiles":
        return (write_rows(parts[0], factor, slots, latent, tail),)
    ropes = parts[1] if len(parts) > 1 else None
    return write_latents(parts[0], ropes, factor, slots, latent, tail, target=target)


@partial(jax.jit, static_argnames=("target",), donate_argnums=0)
def indexer_write(parts: Arrays, slots: jax.Array, key: jax.Array, *, target: Target) -> Arrays:
    (keys,) = parts
    if keys.ndim == 4:
        return (write_index_keys(keys, slots, key, target=target),)
    return (write_rows(keys, jnp.ones(1), slots, key, None),)


@partial(jax.jit, static_argnames=("rows",))
def gather_kv(
    parts: Arrays, factor: jax.Array, slots: jax.Array, *, rows: Rows | None
) -> jax.Array:
    if rows is not None:
        return gathered_mla.gather_rows(values_of(parts), factor, slots, rows=rows)
    (keys,) = parts
    if keys.ndim == 4:
        return gathered_mla.gather_keys(keys, slots)
    plain = Rows("wide", keys.shape[-1], 0)
    return gathered_mla.gather_rows(values_of(parts), factor, slots, rows=plain)


@partial(jax.jit, static_argnames=("max_rows", "scale", "target"))
def indexer_logits(
    q: jax.Array, weights: jax.Array, keys: jax.Array, *given: jax.Array, **static: Any
) -> jax.Array:
    if keys.ndim == 3:
        keys = lax.bitcast_convert_type(keys, jnp.float32)
    return index_scores(q, weights, keys, *given, **static)


@partial(jax.jit, static_argnums=(0, 3))
def gemm(form: ProductForm, x: jax.Array, weight: Matrix, dtype: str) -> jax.Array:
    return products.gemm(form, x, weight, jnp.dtype(dtype))


@partial(jax.jit, static_argnums=(0, 1, 4))
def cut_gemm(form: ProductForm, local: Mesh, x: jax.Array, weight: Matrix, dtype: str) -> jax.Array:
    """Of a matrix whose rows are cut over the devices: each makes its columns of the result."""
    specs = jax.tree.map(lambda part: PartitionSpec(*[TENSOR][: part.ndim]), weight)
    return jax.shard_map(
        lambda x, weight: products.gemm(form, x, weight, jnp.dtype(dtype)),
        mesh=local,
        in_specs=(WHOLE, specs),
        out_specs=PartitionSpec(None, TENSOR),
        check_vma=False,
    )(x, weight)


@partial(jax.jit, static_argnums=0)
def experts(
    form: ProductForm,
    x: jax.Array,
    w13: Matrix,
    w2: Matrix,
    weights: jax.Array,
    ids: jax.Array,
    first: jax.Array,
) -> jax.Array:
    held: int = w13.data.shape[0]
    return products.experts(form, x, w13, w2, weights, ids, first, total=held)
