"""Static tiles: how many rows of a batch are worked on at once."""

from __future__ import annotations

from collections.abc import Iterator

TEMP_BYTES = 48 << 20
"""What the temporaries of one tile may take, in bytes."""


def tile_size(count: int, bytes_each: int, budget: int = TEMP_BYTES) -> int:
    """How many of ``count`` items of ``bytes_each`` fit the budget; at least one."""
    return max(1, min(count, budget // max(1, bytes_each)))


def tiles(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of consecutive tiles; one empty tile if there is nothing."""
    for start in range(0, max(count, 1), size):
        yield start, min(start + size, count)
