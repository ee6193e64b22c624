"""Routing, and the experts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ml4core_tpu.kernels.expert_matmul import Form, Parts, grouped_matmul
from ml4core_tpu.kernels.expert_order import Order, order_rows, tile_rows
from ml4core_tpu.kernels.fp4_experts import Fp4
from ml4core_tpu.kernels.fp8_experts import FP8
from ml4core_tpu.kernels.fp8_matmul import quantized_rows
from ml4core_tpu.kernels.numbers import e4m3_values
from ml4core_tpu.kernels.target import Target

_FEW_ROWS = 256
"""Of all tiles: beyond it a rank works on those that it is likely to have, again and again."""
_ROWS_AT_ONCE = 8192
"""Of tiles that are worked on together: with 6,144 columns and experts as wide 0.5 GiB."""


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
    found, shares = [], []
    for _ in range(topk):
        best = jnp.argmax(left, -1)  # the first of equal ones
        mine = jnp.arange(left.shape[-1]) == best[:, None]
        found.append(best)
        # A sum of one term: to look odds up moves a tile for each of them.
        shares.append(jnp.where(mine, odds, 0.0).sum(-1))
        left = jnp.where(mine, -jnp.inf, left)
    ids = jnp.stack(found, -1).astype(jnp.int32)
    chosen = jnp.stack(shares, -1)
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    return jnp.where(broken, 0.0, chosen * jnp.float32(routed_scale)), ids


def _gated(both: jax.Array, dtype: jnp.dtype) -> jax.Array:
    gate, up = (half.astype(jnp.float32) for half in jnp.split(both, 2, -1))
    return (jax.nn.silu(gate) * up).astype(dtype)


def _joined(
    x: jax.Array,
    weights: jax.Array,
    order: Order,
    inner: Callable[[jax.Array], jax.Array],
    outer: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The weighted sum of experts on ``x`` [T, H], in x's dtype: the sum runs over choices."""
    rows = jnp.pad(x, ((0, 1), (0, 0)))[order.source]  # a row of zeros stands for none
    each = outer(_gated(inner(rows), x.dtype))
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(weights.shape[1]):
        mine = order.mine[:, choice, None]
        found = each[jnp.minimum(order.place[:, choice], each.shape[0] - 1)]
        total += jnp.where(mine, found, 0.0) * jnp.where(mine, weights[:, choice, None], 0.0)
    return total.astype(x.dtype)


def _joined_by_tiles(
    x: jax.Array,
    weights: jax.Array,
    order: Order,
    some: int,
    rows: int,
    mixed: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """The same, by ``some`` tiles at a time and for those alone that have rows: there may be as
    many as all choices of all ranks, of which a rank has its share. ``mixed`` gives fp32 [some *
    rows, H] of gathered rows, tiles' experts, and how many of them are live.
    """
    count, width = x.shape
    total, step = order.source.shape[0], some * rows
    short = -len(order.experts) % some
    experts = jnp.pad(order.experts, (0, short), mode="edge")
    source = jnp.pad(order.source, (0, short * rows), constant_values=count)
    share = jnp.zeros(total + short * rows, jnp.float32)
    place = jnp.where(order.mine, order.place, share.shape[0])
    share = share.at[place.T.reshape(-1)].set(weights.T.reshape(-1), mode="drop")

    def add(at: jax.Array, found: jax.Array) -> jax.Array:
        mine = lax.dynamic_slice_in_dim(source, at * step, step)
        given = jnp.where((mine < count)[:, None], x[jnp.minimum(mine, count - 1)], 0)
        tiles = lax.dynamic_slice_in_dim(experts, at * some, some)
        each = mixed(given, tiles, jnp.clip(order.live - at * some, 0, some))
        each = each * lax.dynamic_slice_in_dim(share, at * step, step)[:, None]
        return found.at[mine].add(each, mode="drop")

    steps = (order.live[0] + some - 1) // some
    found = lax.fori_loop(0, steps, add, jnp.zeros((count, width), jnp.float32))
    return found.astype(x.dtype)


def _grouped(
    x: jax.Array,
    w13: Parts,
    w2: Parts,
    weights: jax.Array,
    ids: jax.Array,
    first: jax.Array,
    *,
    form: Form,
    quantize: bool,
    target: Target,
    total: int | None,
) -> jax.Array:
    hidden, held = x.shape[1], form.size(w13)[0]
    all_ranks = total or held
    rows = tile_rows(ids.size, all_ranks)
    order = order_rows(weights, ids, first, held, rows)
    average = -(-ids.size // all_ranks)  # rows of an expert
    tiles, likely = len(order.experts), held * -(-average // rows)
    some = tiles
    if tiles * rows > _FEW_ROWS:
        some = max(1, min(tiles, 2 * likely, _ROWS_AT_ONCE // rows))

    def product(
        given: jax.Array, tiles: jax.Array, live: jax.Array, parts: Parts, dtype: jnp.dtype
    ) -> jax.Array:
        scale = None
        if quantize:
            codes, scale = quantized_rows(given)
            given, dtype = e4m3_values(codes, x.dtype), jnp.dtype(jnp.float32)
        found = grouped_matmul(
            given,
            tiles,
            live,
            parts,
            form=form,
            rows=rows,
            likely=min(some, likely),
            out_dtype=dtype,
            target=target,
        )
        return found if scale is None else found * scale

    def mixed(given: jax.Array, tiles: jax.Array, live: jax.Array) -> jax.Array:
        middle = _gated(product(given, tiles, live, w13, x.dtype), x.dtype)
        return product(middle, tiles, live, w2, jnp.dtype(jnp.float32))[:, :hidden]

    if some < tiles:
        return _joined_by_tiles(x, weights, order, some, rows, mixed)
    here = order.experts, order.live
    return _joined(
        x,
        weights,
        order,
        lambda given: product(given, *here, w13, x.dtype),
        lambda given: product(given, *here, w2, jnp.dtype(jnp.float32))[:, :hidden],
    )


@partial(jax.jit, static_argnames=("fp4", "target", "total"))
def fp4_moe(
    x: jax.Array,
    w13: Parts,
    w2: Parts,
    weights: jax.Array,
    ids: jax.Array,
    first: jax.Array,
    *,
    fp4: Fp4,
    target: Target,
    total: int | None = None,
) -> jax.Array:
    """Experts ids [T, topk] on ``x`` [T, H]. Weights as ``Fp4`` has them, H and I padded to whole
    blocks: gate and up each to a width that 128 divides. ``total``: experts of all ranks, if these
    aren't all.
    """
    given = (x, w13, w2, weights, ids, first)
    return _grouped(*given, form=fp4, quantize=False, target=target, total=total)


@partial(jax.jit, static_argnames=("quantize", "target", "total"))
def fp8_moe(
    x: jax.Array,
    w13: Parts,
    w2: Parts,
    weights: jax.Array,
    ids: jax.Array,
    first: jax.Array,
    *,
    quantize: bool = False,
    target: Target,
    total: int | None = None,
) -> jax.Array:
    """The same of weights as ``Fp8`` has them. With ``quantize`` inputs of both products are
    rounded to FP8 first, with a scale a row.
    """
    given = (x, w13, w2, weights, ids, first)
    return _grouped(*given, form=FP8, quantize=quantize, target=target, total=total)


@jax.jit
def wide_moe(
    x: jax.Array,
    w13: jax.Array,
    w2: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    first: jax.Array,
) -> jax.Array:
    """Experts ids [T, topk] on ``x`` [T, H] with plain weights [E, 2I, H] and [E, H, I]."""
    experts = w13.shape[0]
    order = order_rows(weights, ids, first, experts, 1)
    sizes = (
        jnp.zeros(experts, jnp.int32)
        .at[order.experts]
        .add((jnp.arange(len(order.experts)) < order.live[0]).astype(jnp.int32))
    )
    dtype = jnp.float32 if jnp.float32 in (x.dtype, w13.dtype) else jnp.bfloat16

    def product(given: jax.Array, weight: jax.Array) -> jax.Array:
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
