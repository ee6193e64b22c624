"""``topk``: the exact k largest, in ascending order of position, ties to the lowest position.

The kernel is ``sieve_topk``, or the tournament of ``ml4core_triton`` where a measurement says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ml4core_cuda.kernels.sieve_topk import sieve_kernel
from ml4core_cuda.kernels.target import device_name, most_registers
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels import topk as shared
from ml4core_triton.kernels.chaining import dependent
from ml4core_triton.kernels.numeric import next_power
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.topk import TILE, Chosen, shape_key


@dataclass(frozen=True)
class Tiling(shared.Tiling):
    """Sizes of a launch.

    Attributes:
        sieve: 1 for ``sieve_topk``, 0 for the tournament, which the fields before are of.
        entries: of a row that a program takes in the first round.
        lanes: times k, as a power of two, that keep maxima.
        warps: of a program.
    """

    sieve: int = 1
    entries: int = 1 << 16
    lanes: int = 2
    warps: int = 8


def tiling(rows: int, columns: int, processors: int) -> Tiling:
    """The default sizes: parts of 64k entries at least, and as many as there are processors for."""
    parts = max(1, min(-(-columns // (1 << 16)), 16, processors // max(1, rows)))
    return Tiling(TILE, 4096, 512, entries=next_power(-(-columns // parts)))


def topk(scores: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions int32 [T, k], lens int32 [T] and has_nan bool [T] of scores fp32 [T, S], of which
    the first visible [T] count. ``ValueError`` for a k above a quarter of a tile.
    """
    chosen = choose(scores, visible, k)
    return chosen.positions, chosen.lens, chosen.has_nan


def choose(
    scores: Tensor,
    visible: Tensor,
    k: int,
    block_table: Tensor | None = None,
    row_request: Tensor | None = None,
    block_size: int = 1,
    *,
    ahead: bool = False,
) -> Chosen:
    """``topk``, with the slots of what is chosen if a block table int32 [R, B] and the request of
    each row int64 [T] are given. ``ahead``: launches may begin before the end of those before.
    """
    rows, columns = scores.shape
    sizes = sizes_for(
        "topk",
        device_name(scores.device),
        shape_key(rows, columns, k),
        tiling(rows, columns, units_of(scores.device)),
    )
    if sizes.sieve and rows and 1 <= k <= TILE // 4:
        given = (scores, visible, k, block_table, row_request, block_size)
        return _sieved(*given, sizes, ahead)
    given = (scores, visible, k, block_table, row_request, block_size)
    return shared.choose(*given, ahead=ahead, measured=lambda shape, default: sizes)


def _sieved(
    scores: Tensor,
    visible: Tensor,
    k: int,
    block_table: Tensor | None,
    row_request: Tensor | None,
    block_size: int,
    sizes: Tiling,
    ahead: bool,
) -> Chosen:
    rows, columns = scores.shape
    device = scores.device

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    convert = block_table is not None and row_request is not None
    positions, lens = ints(rows, k), ints(rows)
    slots = ints(rows, k) if convert else None
    has_nan = torch.empty(rows, dtype=torch.bool, device=device)
    source = scores if scores.stride(1) == 1 else scores.contiguous()
    visible = visible.contiguous()
    table = block_table if block_table is not None and convert else visible
    requests = row_request.contiguous() if row_request is not None and convert else visible
    if convert and table.stride(1) != 1:
        table = table.contiguous()
    kept = next_power(k)
    lanes = max(1024, sizes.lanes * kept)
    stretch = 4 * lanes  # what a program reads at once
    each = -(-sizes.entries // stretch) * stretch
    parts = max(1, -(-columns // each))
    each = min(each, max(1, -(-columns // stretch)) * stretch)
    if parts > lanes:
        raise ValueError(f"top-k over {columns} columns in parts of {each}: too many parts")
    before = (positions, lens)
    in_parts, keyed = 1, False
    while True:
        last = parts == 1
        bits = ints(2, rows, parts, each // 32)
        after = (ints(rows, parts, kept), ints(rows, parts)) if not last else (positions, has_nan)
        keys = positions if last else ints(rows, parts, kept)
        sieve_kernel[(rows, parts)](
            source,
            visible,
            *before,
            bits[0],
            bits[1],
            after[0],
            keys,
            after[1],
            lens,
            positions if slots is None else slots,
            table,
            requests,
            columns,
            each,
            in_parts,
            parts,
            table.shape[1] if convert else 1,
            source.stride(0),
            table.stride(0),
            k,
            KP=kept,
            LANES=lanes,
            BLOCK_SIZE=block_size,
            KEYED=keyed,
            LAST=last,
            SLOTS=convert,
            DEPENDENT=ahead,
            num_warps=sizes.warps,
            maxnreg=most_registers(sizes.warps),
            **dependent(ahead),
        )
        if last:
            return Chosen(positions, lens, has_nan, slots)
        # One program takes what the parts have kept.
        before, source, in_parts, keyed = after, keys.view(rows, parts * kept), parts, True
        columns, parts = parts * kept, 1
        each = -(-columns // stretch) * stretch
