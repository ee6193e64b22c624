"""Rows of a step as tiles that each belong to one request: which request is data, how many tiles
there are is not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_FEW_ROWS = 256


def tile_rows(rows: int) -> int:
    """Rows of a tile: those of a verify window, or more where chunks are likely."""
    return 4 if rows <= _FEW_ROWS else 8


def tile_count(rows: int, requests: int, each: int) -> int:
    """Tiles of ``each`` rows at most, for any division of ``rows`` among ``requests``."""
    return min(rows, rows // each + requests)


def tiles_of(
    block_table: jax.Array, query_start: jax.Array, rows: int, each: int
) -> tuple[jax.Array, jax.Array]:
    """The tables int32 [M, B] and the starts int32 [M + 1] of tiles of ``each`` rows at most, as if
    each were a request; those behind the last live one have no rows.

    Args:
        block_table: int32 [R, B].
        query_start: int32 [R + 1], rows of requests that follow each other, within ``rows``.
    """
    requests = block_table.shape[0]
    tiles = tile_count(rows, requests, each)
    count = (query_start[1:] - query_start[:-1] + each - 1) // each
    ends = jnp.cumsum(count)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    request = (tile[:, None] >= ends).sum(-1, dtype=jnp.int32)
    live = request < requests
    request = jnp.minimum(request, requests - 1)
    place = tile - (ends - count)[request]
    start = jnp.where(live, query_start[request] + place * each, query_start[-1])
    return block_table[request], jnp.concatenate((start, query_start[-1:])).astype(jnp.int32)
