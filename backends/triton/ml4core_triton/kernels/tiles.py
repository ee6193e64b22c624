"""Where a token's key lies in a page of the index cache: the one rule of every kernel here.

A page holds the codes of all its tokens, then a float32 scale for each, in order. Codes lie token
by token, or in tiles of 16 tokens x 16 bytes, [block_size / 16][D / 16][16 tokens][16 bytes]: a
tile is what 16 lanes of a matrix instruction read at once. Offsets are bytes from the page's start.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 16

_TILE = tl.constexpr(TILE)


@triton.jit
def code_offset(token, column, D: tl.constexpr, TILED: tl.constexpr):
    """Of code ``column`` of a token inside its page; the two broadcast."""
    if TILED:
        tile = (token // _TILE) * (_TILE * D) + (column // _TILE) * (_TILE * _TILE)
        found = tile + (token % _TILE) * _TILE + column % _TILE
    else:
        found = token * D + column
    return found


@triton.jit
def scale_offset(token, D: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Of the scale of a token inside its page of ``BLOCK_SIZE``; the same in either order."""
    return BLOCK_SIZE * D + 4 * token
