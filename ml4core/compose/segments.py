"""A step cut into pieces of alike rows, for ops that work on a batch of requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ml4core.api import StepPlan

_WINDOW = 16
"""Rows of a request that are more than a window, which no tile cuts."""


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of consecutive requests. ``query_start`` counts from the piece's first
    row.
    """

    rows: slice
    requests: slice
    query_start: Tensor
    max_rows: int


def pieces(plan: StepPlan, tile_rows: int | None = None) -> Iterator[Piece]:
    """The plan's segments, each cut into tiles whose grids, ``requests * max_rows``, have at most
    about ``tile_rows`` cells. The cuts depend on the shape alone.

    A tile has a row of each of its requests at least, and the whole of a window of a few rows.
    """
    first_row = first_request = 0
    for segment in plan.shape.segments:
        last_request = first_request + segment.requests
        start = plan.query_start[first_request : last_request + 1] - first_row
        cells = segment.requests * segment.max_rows
        limit = max(tile_rows or cells, segment.max_rows if segment.max_rows < _WINDOW else 1)
        if cells <= limit:
            rows = slice(first_row, first_row + segment.rows)
            yield Piece(rows, slice(first_request, last_request), start, segment.max_rows)
        elif segment.rows == cells and segment.max_rows <= limit:
            # Decodes, verify windows and chunks of one length: whole requests to a tile.
            step = limit // segment.max_rows
            for i in range(0, segment.requests, step):
                j = min(i + step, segment.requests)
                yield Piece(
                    slice(first_row + i * segment.max_rows, first_row + j * segment.max_rows),
                    slice(first_request + i, first_request + j),
                    start[i : j + 1] - i * segment.max_rows,
                    segment.max_rows,
                )
        else:
            # Chunks: rows to a tile; a request has only its rows that lie inside. Which these are
            # the shape doesn't say, so each tile has cells for every request.
            step = max(1, limit // segment.requests)
            for i in range(0, segment.rows, step):
                j = min(i + step, segment.rows)
                yield Piece(
                    slice(first_row + i, first_row + j),
                    slice(first_request, last_request),
                    (start - i).clamp(0, j - i),
                    min(segment.max_rows, j - i),
                )
        first_row += segment.rows
        first_request = last_request
