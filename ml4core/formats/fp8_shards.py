"""Joining and cutting FP8 block weights by rows.

Blocks start at the first row of the tensor they were made for. Joined parts keep their own blocks,
so the scales of a stack are those of one weight only if every part but the last is a whole number
of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml4core.formats.blocks import block_count
from ml4core.formats.fp8_block import BLOCK


def scale_rows(part_rows: Sequence[int]) -> int:
    """Rows of scales that parts of `part_rows` rows bring along: the sum of the ceilings."""
    return sum(block_count(rows, BLOCK) for rows in part_rows)


def stack_rows(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One weight of several stacked by rows, each bytes [N_i, K] and its scales.

    ValueError if a part other than the last is not a whole number of blocks: dequantize such parts
    and quantize the stack.
    """
    for index, (code, _) in enumerate(parts[:-1]):
        rows = code.shape[-2]
        if rows % BLOCK:
            raise ValueError(
                f"part {index} of {len(parts)} has {rows} rows, not a multiple of {BLOCK}: its "
                f"last block would run into part {index + 1}. Put it last, or dequantize the "
                "parts and quantize the stack"
            )
    code = torch.cat([code for code, _ in parts], dim=-2)
    return code, torch.cat([scale for _, scale in parts], dim=-2)


def slice_rows(code: Tensor, scale: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Rows start..stop-1 of a weight, bytes [..., N, K], and of its scales.

    ValueError unless `start` is a multiple of 128 and `stop` is one too or the end.
    """
    rows = code.shape[-2]
    if start % BLOCK or (stop % BLOCK and stop != rows):
        raise ValueError(
            f"rows {start}..{stop} of {rows} do not fall on blocks of {BLOCK} rows; "
            f"cut at multiples of {BLOCK} or dequantize first"
        )
    return code[..., start:stop, :], scale[..., start // BLOCK : block_count(stop, BLOCK), :]


def row_shard(code: Tensor, scale: Tensor, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Shard `rank` of `world` equal row shards of a weight, and its scales.

    ValueError if they don't fall on blocks; it names the numbers of shards that work.
    """
    rows = code.shape[-2]
    if rows % world or (rows // world) % BLOCK:
        valid = [n for n in range(1, rows // BLOCK + 1) if rows % (n * BLOCK) == 0]
        raise ValueError(
            f"{rows} rows over {world} shards is {rows / world:g} rows each, not a multiple of "
            f"{BLOCK}; shards that work: {valid or 'none'}"
        )
    size = rows // world
    return slice_rows(code, scale, rank * size, (rank + 1) * size)
