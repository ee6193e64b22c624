"""``topk``: the exact k largest, in ascending order of position, ties to the lowest position.

The kernels are those of ``spread_topk`` where there are few rows, else ``sieve_topk``, or the
tournament of ``ml4core_triton`` where a measurement says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ml4core_cuda.kernels.sieve_topk import sieve_kernel
from ml4core_cuda.kernels.spread_topk import STRETCH, choose_kernel, list_kernel, maxima_kernel
from ml4core_cuda.kernels.target import device_name, most_registers
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels import topk as shared
from ml4core_triton.kernels.chaining import dependent
from ml4core_triton.kernels.numeric import next_power
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.topk import TILE, Chosen, shape_key

_LONG = 1 << 14
"""Columns from which three launches are taken to be less than one that does all."""


@dataclass(frozen=True)
class Tiling(shared.Tiling):
    """Sizes of a launch.

    Attributes:
        sieve: 1 for this backend's own kernels, 0 for the tournament, which the fields before are
            of.
        parts: programs a row of ``spread_topk``, a power of two; 0 for ``sieve_topk``.
        entries: of a row that a program of ``sieve_topk`` takes in the first round.
        lanes: times k, as a power of two, that keep maxima.
        warps: of a program; in ``spread_topk``, of the second launch.
        ends: warps of a program of the third launch of ``spread_topk``.
    """

    sieve: int = 1
    parts: int = 0
    entries: int = 1 << 16
    lanes: int = 2
    warps: int = 8
    ends: int = 8


def tiling(rows: int, columns: int, processors: int) -> Tiling:
    """The default sizes: a long row is spread over as many programs as two a processor leave it.
    Where that is one, and for short rows, parts of 64k entries at least.
    """
    wanted = min(2 * processors // max(1, rows), columns // 512, 128)
    if wanted > 1 and _LONG <= columns < 1 << 27:  # so many bits hold a count there
        parts = next_power(wanted + 1) // 2
        return Tiling(TILE, 4096, 512, parts=parts, warps=8)
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
    if not (sizes.sieve and rows and 1 <= k <= TILE // 4):
        given = (scores, visible, k, block_table, row_request, block_size)
        return shared.choose(*given, ahead=ahead, measured=lambda shape, default: sizes)
    convert = block_table is not None and row_request is not None
    source = scores if scores.stride(1) == 1 else scores.contiguous()
    visible = visible.contiguous()
    table = block_table if block_table is not None and convert else visible
    requests = row_request.contiguous() if row_request is not None and convert else visible
    if convert and table.stride(1) != 1:
        table = table.contiguous()
    chosen = Chosen(
        _ints(scores, rows, k),
        _ints(scores, rows),
        torch.empty(rows, dtype=torch.bool, device=scores.device),
        _ints(scores, rows, k) if convert else None,
    )
    launch = _spread if sizes.parts else _sieved
    launch(source, visible, k, table, requests, block_size, sizes, ahead, chosen)
    return chosen


def _ints(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


def _spread(
    scores: Tensor,
    visible: Tensor,
    k: int,
    table: Tensor,
    requests: Tensor,
    block_size: int,
    sizes: Tiling,
    ahead: bool,
    chosen: Chosen,
) -> None:
    rows, columns = scores.shape
    kept, parts = next_power(k), sizes.parts
    lanes = max(1024, sizes.lanes * kept)
    own = lanes // parts
    # Registers of a thread hold 16 entries or 32.
    deep = min(next_power(-(-columns // lanes)), max(1, 8192 // own))
    most = -(-columns // (parts * STRETCH)) * STRETCH  # of a stretch
    tile = min(next_power(most), 512 * sizes.warps)
    convert, stride = chosen.slots is not None, scores.stride(0)
    maxima, bounds = _ints(scores, rows, lanes), _ints(scores, rows, 2)
    room = min(most, lanes)  # more than that aren't chosen from a list
    listed = torch.empty(rows, parts, room, dtype=torch.int64, device=scores.device)
    counts = _ints(scores, rows, parts)
    maxima_kernel[(rows, parts)](
        scores,
        visible,
        maxima,
        columns,
        stride,
        LANES=lanes,
        OWN=own,
        DEEP=deep,
        DEPENDENT=ahead,
        num_warps=max(1, min(8, own * deep // 512)),
        **dependent(ahead),
    )
    list_kernel[(rows, parts)](
        scores,
        visible,
        maxima,
        listed,
        counts,
        bounds,
        columns,
        room,
        stride,
        k,
        PARTS=parts,
        LANES=lanes,
        TILE=tile,
        STRETCH=STRETCH,
        num_warps=sizes.warps,
        maxnreg=most_registers(max(16, sizes.warps)),
        **dependent(True),
    )
    choose_kernel[(rows,)](
        scores,
        visible,
        listed,
        counts,
        bounds,
        chosen.positions,
        chosen.has_nan,
        chosen.lens,
        chosen.positions if chosen.slots is None else chosen.slots,
        table,
        requests,
        columns,
        room,
        table.shape[1] if convert else 1,
        stride,
        table.stride(0),
        k,
        KP=kept,
        PARTS=parts,
        LANES=lanes,
        BLOCK_SIZE=block_size,
        SLOTS=convert,
        DEPENDENT=ahead,
        num_warps=sizes.ends,
        maxnreg=most_registers(sizes.ends),
        **dependent(True),
    )


def _sieved(
    scores: Tensor,
    visible: Tensor,
    k: int,
    table: Tensor,
    requests: Tensor,
    block_size: int,
    sizes: Tiling,
    ahead: bool,
    chosen: Chosen,
) -> None:
    rows, columns = scores.shape
    source, convert = scores, chosen.slots is not None
    kept = next_power(k)
    lanes = max(1024, sizes.lanes * kept)
    stretch = 4 * lanes  # what a program reads at once
    each = -(-sizes.entries // stretch) * stretch
    parts = max(1, -(-columns // each))
    each = min(each, max(1, -(-columns // stretch)) * stretch)
    if parts > lanes:
        raise ValueError(f"top-k over {columns} columns in parts of {each}: too many parts")
    before = (chosen.positions, chosen.lens)
    in_parts, keyed = 1, False
    while True:
        last = parts == 1
        bits = _ints(scores, 2, rows, parts, each // 32)
        after = (chosen.positions, chosen.has_nan)
        keys = chosen.positions
        if not last:
            after = (_ints(scores, rows, parts, kept), _ints(scores, rows, parts))
            keys = _ints(scores, rows, parts, kept)
        sieve_kernel[(rows, parts)](
            source,
            visible,
            *before,
            bits[0],
            bits[1],
            after[0],
            keys,
            after[1],
            chosen.lens,
            chosen.positions if chosen.slots is None else chosen.slots,
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
            return
        # One program takes what the parts have kept.
        before, source, in_parts, keyed = after, keys.view(rows, parts * kept), parts, True
        columns, parts = parts * kept, 1
        each = -(-columns // stretch) * stretch
