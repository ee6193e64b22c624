"""The order of rows by expert: each expert's stand together, in tiles of their own."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_MOST_ROWS = 128
_GROUP = 128
"""Choices that are counted together."""


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


def _running(marks: jax.Array) -> jax.Array:
    """Running sums int32 of ``marks`` [E, C] of 0 and 1 along C: within groups by a product with a
    triangle of ones, which compiles in a tenth of the time of one long sum.
    """
    count = marks.shape[1]
    groups = jnp.pad(marks, ((0, 0), (0, -count % _GROUP))).reshape(len(marks), -1, _GROUP)
    triangle = jnp.triu(jnp.ones((_GROUP, _GROUP), jnp.bfloat16))
    # Counts to 128 are exact in fp32, and so are their operands in bfloat16.
    inside = jnp.matmul(
        groups.astype(jnp.bfloat16), triangle, preferred_element_type=jnp.float32
    ).astype(jnp.int32)
    each = groups.sum(-1)
    before = jnp.cumsum(each, 1) - each
    return (inside + before[..., None]).reshape(len(marks), -1)[:, :count]


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
    # Choices lie along the lanes, first ones first: [T, topk] would be laid out anew.
    expert = jnp.where(mine, local, -1).T.reshape(-1)
    onehot = (expert == jnp.arange(experts, dtype=jnp.int32)[:, None]).astype(jnp.int32)  # [E, C]
    tiles_each = (onehot.sum(1) + rows - 1) // rows
    ends = jnp.cumsum(tiles_each)
    tiles = min(choices, choices // rows + experts)
    total = tiles * rows
    # A choice's place among those of its expert, and the first row of the expert.
    place = (onehot * (_running(onehot) - 1 + (ends - tiles_each)[:, None] * rows)).sum(0)
    place = jnp.where(expert >= 0, place, total).astype(jnp.int32)
    token = jnp.arange(choices, dtype=jnp.int32) % count
    source = jnp.full(total, count, jnp.int32).at[place].set(token, mode="drop")
    tile = jnp.minimum(jnp.arange(tiles), jnp.maximum(ends[-1] - 1, 0))
    owner = (tile[:, None] >= ends).sum(-1, dtype=jnp.int32)
    return Order(
        place.reshape(topk, count).T,
        source,
        jnp.minimum(owner, experts - 1),
        ends[-1:].astype(jnp.int32),
        mine,
    )
