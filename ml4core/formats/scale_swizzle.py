"""The 128 x 4 tiled order in which FP4 matrix units read block scales.

A tile covers 128 rows and 4 blocks in 512 bytes: byte (row % 32) * 16 + (row // 32) * 4 + block.
Tiles follow each other along the blocks, then along the rows. Ragged tiles are filled with zeros,
as a reader reads all of a tile and zero bytes mean zero in E4M3.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ml4core.formats.blocks import block_count

TILE_ROWS = 128
TILE_BLOCKS = 4


def padded_shape(rows: int, blocks: int) -> tuple[int, int]:
    """Rows and blocks rounded up to whole tiles."""
    return block_count(rows, TILE_ROWS) * TILE_ROWS, block_count(blocks, TILE_BLOCKS) * TILE_BLOCKS


def swizzle(scale: Tensor) -> Tensor:
    """Scales uint8 [..., rows, blocks] in tiled order, uint8 [..., rows', blocks'], padded."""
    rows, blocks = scale.shape[-2:]
    padded_rows, padded_blocks = padded_shape(rows, blocks)
    padded = F.pad(scale, (0, padded_blocks - blocks, 0, padded_rows - rows))
    # [..., row tile, row // 32, row % 32, block tile, block]
    tiles = padded.unflatten(-2, (-1, 4, 32)).unflatten(-1, (-1, TILE_BLOCKS))
    tiles = tiles.movedim(-2, -4).transpose(-2, -3)
    return tiles.reshape(padded.shape)


def unswizzle(tiled: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales uint8 [..., rows, blocks] of the bytes [..., rows', blocks'] in tiled order."""
    tiles = tiled.reshape(
        *tiled.shape[:-2],
        tiled.shape[-2] // TILE_ROWS,
        tiled.shape[-1] // TILE_BLOCKS,
        32,
        4,
        TILE_BLOCKS,
    )
    plain = tiles.transpose(-2, -3).movedim(-4, -2)
    return plain.reshape(tiled.shape)[..., :rows, :blocks]
