"""Routing, the order of rows by expert, and the experts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ml4core_tpu.kernels.fp4_experts import Fp4, grouped_matmul
from ml4core_tpu.kernels.fp8_matmul import quantized_rows
from ml4core_tpu.kernels.numbers import e4m3_values
from ml4core_tpu.kernels.target import Target

_MOST_ROWS = 128


@partial(jax.jit, static_argnames=("topk", "renormalize", "routed_scale"))
def router(
    x: jax.Array, weight: jax.Array, *, topk: int, renormalize: bool, routed_scale: float
) -> tuple[jax.Array, jax.Array]:
    """Weights fp32 [T, topk] and expert ids int32 [T, topk] of ``x`` [T, H], ``weight`` [E, H]:
    softmax over all, the largest in descending order, ties to the lowest id.
    """
    logits = jnp.matmul(
        x.astype(jnp.float32), weight.astype(jnp.float32).T, precision=lax.Precision.HIGHEST
    )
    broken = ~jnp.isfinite(logits).all(-1, keepdims=True)
    usable = jnp.where(broken, 0.0, logits)
    odds = jax.nn.softmax(usable, axis=-1)
    # The order is that of the logits: odds may be equal where these are not. -0 and 0 are equal.
    left = jnp.where(usable == 0, 0.0, usable)
    found = []
    for _ in range(topk):
        best = jnp.argmax(left, -1)  # the first of equal ones
        found.append(best)
        left = jnp.where(jnp.arange(left.shape[-1]) == best[:, None], -jnp.inf, left)
    ids = jnp.stack(found, -1).astype(jnp.int32)
    chosen = jnp.take_along_axis(odds, ids, -1)
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    return jnp.where(broken, 0.0, chosen * jnp.float32(routed_scale)), ids


class Order(NamedTuple):
    """Where choices stand once rows are sorted by expert, each expert's in tiles of their own.

    Attributes:
        place: int32 [T, topk], the row of a choice; beyond all rows for those that add nothing.
        source: int32 [M], the token of each row; T where there is none.
        experts: int32 [tiles], that of each tile; the last one's behind the live ones.
        live: int32 [1], tiles that have rows.
        mine: bool [T, topk], choices that add something.
    """

    place: jax.Array
    source: jax.Array
    experts: jax.Array
    live: jax.Array
    mine: jax.Array


def tile_rows(choices: int, experts: int) -> int:
    """Rows of a tile, by the rows that an expert gets on average."""
    average = -(-choices // experts)
    return min(_MOST_ROWS, max(16, 1 << (average - 1).bit_length()))


def order_rows(
    weights: jax.Array, ids: jax.Array, first: jax.Array, experts: int, rows: int
) -> Order:
    """The order of choices [T, topk] of experts ``first`` .. ``first + experts - 1``, in tiles of
    ``rows`` rows. ``first`` is data: ranks of other experts run the same program.
    """
    count, topk = ids.shape
    choices = count * topk
    local = ids.astype(jnp.int32) - first
    mine = (local >= 0) & (local < experts) & (weights != 0)
    expert = jnp.where(mine, local, experts).reshape(-1)
    onehot = (expert[:, None] == jnp.arange(experts)).astype(jnp.int32)
    rank = jnp.take_along_axis(jnp.cumsum(onehot, 0), jnp.minimum(expert, experts - 1)[:, None], 1)[
        :, 0
    ]
    tiles_each = (onehot.sum(0) + rows - 1) // rows
    ends = jnp.cumsum(tiles_each)
    tiles = min(choices, choices // rows + experts)
    total = tiles * rows
    start = (ends - tiles_each)[jnp.minimum(expert, experts - 1)] * rows
    place = jnp.where(mine.reshape(-1), start + rank - 1, total).astype(jnp.int32)
    token = jnp.arange(choices, dtype=jnp.int32) // topk
    source = jnp.full(total, count, jnp.int32).at[place].set(token, mode="drop")
    tile = jnp.minimum(jnp.arange(tiles), jnp.maximum(ends[-1] - 1, 0))
    owner = (tile[:, None] >= ends).sum(-1, dtype=jnp.int32)
    return Order(
        place.reshape(count, topk),
        source,
        jnp.minimum(owner, experts - 1),
        ends[-1:].astype(jnp.int32),
        mine,
    )


def _joined(
    x: jax.Array,
    weights: jax.Array,
    order: Order,
    inner: Callable[[jax.Array], jax.Array],
    outer: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The weighted sum of experts on ``x`` [T, H], in x's dtype: the sum runs over choices."""
    rows = jnp.pad(x, ((0, 1), (0, 0)))[order.source]  # a row of zeros stands for none
    both = inner(rows).astype(jnp.float32)
    gate, up = jnp.split(both, 2, -1)
    middle = (jax.nn.silu(gate) * up).astype(x.dtype)
    each = outer(middle)
    found = each[jnp.minimum(order.place, each.shape[0] - 1)]  # [T, topk, H]
    shares = jnp.where(order.mine, weights, 0.0)[..., None]
    found = jnp.where(order.mine[..., None], found, 0.0)
    return (found * shares).sum(1).astype(x.dtype)


@partial(jax.jit, static_argnames=("fp4", "target", "total"))
def fp4_moe(
    x: jax.Array,
    w13: tuple[jax.Array, jax.Array, jax.Array],
    w2: tuple[jax.Array, jax.Array, jax.Array],
    weights: jax.Array,
    ids: jax.Array,
    first: jax.Array,
    *,
    fp4: Fp4,
    target: Target,
    total: int | None = None,
) -> jax.Array:
    """Experts ids [T, topk] on ``x`` [T, H]. Weights as ``grouped_matmul`` has them, H and I padded
    to whole blocks: gate and up each to a width that 128 divides. ``total``: experts of all ranks,
    if these aren't all.
    """
    hidden = x.shape[1]
    experts = w13[0].shape[0]
    rows = tile_rows(ids.size, total or experts)
    order = order_rows(weights, ids, first, experts, rows)

    def product(given: jax.Array, weight: tuple[jax.Array, ...], dtype: jnp.dtype) -> jax.Array:
        width = 2 * weight[0].shape[1]
        given = jnp.pad(given, ((0, 0), (0, width - given.shape[1])))
        return grouped_matmul(
            given,
            order.experts,
            order.live,
            *weight,
            fp4=fp4,
            rows=rows,
            out_dtype=dtype,
            target=target,
        )

    return _joined(
        x,
        weights,
        order,
        lambda given: product(given, w13, x.dtype),
        lambda given: product(given, w2, jnp.float32)[:, :hidden],
    )


@partial(jax.jit, static_argnames=("quantize",))
def wide_moe(
    x: jax.Array,
    w13: jax.Array,
    w2: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    first: jax.Array,
    *,
    quantize: bool = False,
) -> jax.Array:
    """Experts ids [T, topk] on ``x`` [T, H] with plain weights [E, 2I, H] and [E, H, I]. With
    ``quantize`` inputs of both products are rounded to FP8 first, with a scale a row.
    """
    experts = w13.shape[0]
    order = order_rows(weights, ids, first, experts, 1)
    sizes = (
        jnp.zeros(experts, jnp.int32)
        .at[order.experts]
        .add((jnp.arange(len(order.experts)) < order.live[0]).astype(jnp.int32))
    )
    dtype = jnp.float32 if jnp.float32 in (x.dtype, w13.dtype) else jnp.bfloat16

    def product(given: jax.Array, weight: jax.Array) -> jax.Array:
        if quantize:
            codes, scale = quantized_rows(given)
            given = e4m3_values(codes) * scale
        return lax.ragged_dot(
            given.astype(dtype),
            weight.astype(dtype).swapaxes(1, 2),
            sizes,
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    return _joined(
        x,
        weights,
        order,
        lambda given: product(given, w13),
        lambda given: product(given, w2),
    )
