"""Rows of a step as cells [request, row], and back."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Grid:
    """Attributes:
    row: int32 [R, Q], the row of each cell; any row where there is none.
    real: bool [R, Q].
    request, place: int32 [T], the cell of each row; the last request's where it has none.
    owned: bool [T], whether a request has the row.
    """

    row: jax.Array
    real: jax.Array
    request: jax.Array
    place: jax.Array
    owned: jax.Array

    def spread(self, values: jax.Array, fill: float = 0) -> jax.Array:
        """Cells [R, Q, ...] of rows [T, ...], ``fill`` where there is no row."""
        cells = values[self.row]
        real = self.real.reshape(*self.real.shape, *(1,) * (values.ndim - 1))
        return jnp.where(real, cells, jnp.asarray(fill, values.dtype))

    def collect(self, cells: jax.Array, fill: float) -> jax.Array:
        """Rows [T, ...] of cells [R, Q, ...], ``fill`` for rows of no request."""
        found = cells[self.request, self.place]
        owned = self.owned.reshape(-1, *(1,) * (found.ndim - 1))
        return jnp.where(owned, found, jnp.asarray(fill, found.dtype))


def grid_of(query_start: jax.Array, rows: int, max_rows: int) -> Grid:
    """The grid of rows query_start[r]:query_start[r + 1] of each request, ``max_rows`` at most."""
    start, end = query_start[:-1], query_start[1:]
    row = start[:, None] + jnp.arange(max_rows, dtype=jnp.int32)
    real = row < end[:, None]
    every = jnp.arange(rows, dtype=jnp.int32)
    request = (every[:, None] >= end).sum(-1, dtype=jnp.int32)
    owned = (request < len(end)) & (every >= start[0])
    request = jnp.minimum(request, len(end) - 1)
    place = jnp.clip(every - start[request], 0, max_rows - 1)
    return Grid(jnp.clip(row, 0, rows - 1), real, request, place, owned)
