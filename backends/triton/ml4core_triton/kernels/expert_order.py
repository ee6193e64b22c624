"""Which rows go to which expert: choices in the order of experts, cut into tiles.

All on the device and of sizes that follow from shapes alone, so that a graph can hold it; nothing
is padded, as a tile names its first choice and how many it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.numeric import next_power


@dataclass(frozen=True)
class ExpertOrder:
    """Choices are numbered t * topk + j.

    Attributes:
        order: int32 [T topk], the choices of expert 0, then 1, ..; within one in ascending order.
            Those that add nothing are left out; what stands behind the last is not defined.
        tiles: int32 [S, 3]: expert, first place in ``order``, and how many; how many is 0 for a
            tile that isn't needed.
        rows: choices of a tile at most.
    """

    order: Tensor
    tiles: Tensor
    rows: int


@triton.jit
def _local(ids, weights, at, count, E, first_expert):
    """The expert int32 of choices, E for those that add nothing here."""
    real = at < count
    expert = tl.load(ids + at, mask=real, other=-1) - first_expert
    weight = tl.load(weights + at, mask=real, other=0.0)
    mine = real & (expert >= 0) & (expert < E) & (weight != 0)
    return tl.where(mine, expert, E).to(tl.int32)


@triton.jit
def _order_kernel(
    ids, weights, order, tiles, count, E, first_expert, spare,
    ROWS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (E,): each program finds where its expert begins, and places its choices."""
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    held = tl.zeros([BINS], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        held += tl.histogram(_local(ids, weights, at, count, E, first_expert), BINS)
    held = tl.where(bins < E, held, 0)
    needed = (held + ROWS - 1) // ROWS
    begin = tl.sum(tl.where(bins < mine, held, 0), axis=0)
    tile = tl.sum(tl.where(bins < mine, needed, 0), axis=0)
    own = tl.sum(tl.where(bins == mine, held, 0), axis=0)
    for done in range(0, own, ROWS):
        where = tiles + (tile + done // ROWS) * 3
        tl.store(where, mine)
        tl.store(where + 1, begin + done)
        tl.store(where + 2, tl.minimum(own - done, ROWS))
    # Unneeded tiles, shared among the programs.
    for one in range(tl.sum(needed, axis=0) + mine, spare, E):
        tl.store(tiles + one * 3, 0)
        tl.store(tiles + one * 3 + 1, 0)
        tl.store(tiles + one * 3 + 2, 0)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        hit = _local(ids, weights, at, count, E, first_expert) == mine
        rank = tl.cumsum(hit.to(tl.int32), axis=0)
        tl.store(order + begin + rank - 1, at, mask=hit)
        begin += tl.sum(hit.to(tl.int32), axis=0)


def expert_order(
    ids: Tensor, weights: Tensor, experts: int, first_expert: int, rows: int
) -> ExpertOrder:
    """The order of choices int64 [T, topk] among this rank's ``experts``, in tiles of ``rows``."""
    count = ids.numel()
    spare = min(count, experts + count // rows)
    order = torch.empty(count, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(spare, 3, dtype=torch.int32, device=ids.device)
    _order_kernel[(experts,)](
        ids.contiguous(), weights.contiguous(), order, tiles, count, experts, first_expert, spare,
        ROWS=rows, BINS=next_power(experts + 1), BLOCK=min(1024, max(32, next_power(count))),
    )  # fmt: skip
    return ExpertOrder(order, tiles, rows)
