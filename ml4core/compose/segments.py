"""A step cut into pieces of alike rows, for ops that work on a batch of requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ml4core.api import StepPlan


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
    """The plan's segments, each cut into tiles of about ``tile_rows`` rows. The cuts depend on the
    shape alone.
    """
    first_row = first_request = 0
    for segment in plan.shape.segments:
        last_request = first_request + segment.requests
        start = plan.query_start[first_request : last_request + 1] - first_row
        limit = max(tile_rows or segment.rows, segment.max_rows if segment.max_rows < 16 else 1)
        if segment.rows <= limit:
            rows = slice(first_row, first_row + segment.rows)
            yield Piece(rows, slice(first_request, last_request), start, segment.max_rows)
        elif segment.rows == segment.requests * segment.max_rows:
            # Decodes and verify windows: whole requests to a tile.
            step = max(1, limit // segment.max_rows)
            for i in range(0, segment.requests, step):
                j = min(i + step, segment.requests)
                yield Piece(
                    slice(first_row + i * segment.max_rows, first_row + j * segment.max_rows),
                    slice(first_request + i, first_request + j),
                    start[i : j + 1] - i * segment.max_rows,
                    segment.max_rows,
                )
        else:
            # Chunks: rows to a tile; a request has only its rows that lie inside.
            for i in range(0, segment.rows, limit):
                j = min(i + limit, segment.rows)
                yield Piece(
                    slice(first_row + i, first_row + j),
                    slice(first_request, last_request),
                    (start - i).clamp(0, j - i),
                    min(segment.max_rows, j - i),
                )
        first_row += segment.rows
        first_request = last_request
