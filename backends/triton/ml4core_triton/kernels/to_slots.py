"""``to_slots``: positions of a request to slots of its pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_triton.kernels.numeric import next_power

_MOST = 2048
"""Positions that a program converts."""


@triton.jit
def slot_of(position, chosen, table, pages, BLOCK_SIZE: tl.constexpr):
    """Slots int32 of ``position`` in the request whose page ids ``table`` points at; -1 where not
    ``chosen``. Positions behind the table take its last entry.
    """
    inside = tl.maximum(tl.minimum(position, pages * BLOCK_SIZE - 1), 0)
    page = tl.load(table + inside // BLOCK_SIZE, mask=chosen, other=0)
    return tl.where(chosen, page * BLOCK_SIZE + inside % BLOCK_SIZE, -1)


@triton.jit
def to_slots_kernel(
    positions,
    block_table,
    row_request,
    slots,
    keys,
    pages,
    position_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    fits = column < keys
    position = tl.load(positions + row * position_stride + column, fits, other=-1)
    table = block_table + tl.load(row_request + row) * table_stride
    found = slot_of(position, fits & (position >= 0), table, pages, BLOCK_SIZE)
    tl.store(slots + row * keys + column, found, fits)


def to_slots(
    positions: Tensor, block_table: Tensor, row_request: Tensor, block_size: int
) -> Tensor:
    """Slots int32 [T, k] of positions int32 [T, k] in the pages int32 [R, B] of each row's request
    int64 [T]; what is below 0 stays -1.
    """
    rows, keys = positions.shape
    slots = torch.empty(rows, keys, dtype=torch.int32, device=positions.device)
    if not slots.numel():
        return slots
    if positions.stride(1) != 1:
        positions = positions.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    size = min(_MOST, next_power(keys))
    to_slots_kernel[(rows, -(-keys // size))](
        positions,
        block_table,
        row_request.contiguous(),
        slots,
        keys,
        block_table.shape[1],
        positions.stride(0),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        BK=size,
        num_warps=4,
    )
    return slots
