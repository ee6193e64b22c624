"""Rows of a step as tiles that each belong to one request: which request is data, how many tiles
there are is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_FEW_ROWS = 256
_LEAST_CHUNK = 16


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


def chunk_of(rows: int, requests: int, fits: Callable[[int, int], bool]) -> int:
    """The most rows, of ``rows`` halved some times and 16 at least, whose tiles ``fits`` takes: so
    many of so many rows each.
    """
    chunk = rows
    while chunk > _LEAST_CHUNK:
        each = tile_rows(chunk)
        if fits(tile_count(chunk, requests, each), each):
            break
        chunk = -(-chunk // 2)
    return chunk


def by_chunks(some: Callable[[jax.Array], Any], rows: int, chunk: int) -> Any:
    """What ``some`` makes of ``chunk`` rows from a first one on, of all ``rows``: arrays [rows,
    ...] of arrays [chunk, ...].
    """
    count = -(-rows // chunk)
    if count == 1:
        return some(jnp.int32(0))
    # The last chunk begins where a whole one still fits: its first rows come twice.
    firsts = jnp.minimum(jnp.arange(count, dtype=jnp.int32) * chunk, rows - chunk)
    parts = lax.map(some, firsts)
    row = jnp.arange(rows, dtype=jnp.int32)
    at = jnp.minimum(row // chunk, count - 1)
    return jax.tree.map(lambda part: part[at, row - firsts[at]], parts)
