"""``sparse_mla``: attention of absorbed queries over chosen slots of a latent cache.

Queries in bf16 over rows of 512 latents and 64 rope values have forms of their own on an
architecture whose matrix units those are for: ``warp_mla`` over ``fp8_ds_mla``, and ``tile_mla``.
All else meets in ``attend_slots``: a tile there has 16 heads at least, which is the least that the
matrix units take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.kernels import tile_mla
from ml4core_cuda.kernels.target import arch_of, device_name, gluon
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels import attend_slots
from ml4core_triton.kernels.attend_slots import Plan
from ml4core_triton.kernels.latents import LatentRows, latent_rows
from ml4core_triton.kernels.merge_lse import merge
from ml4core_triton.kernels.numeric import next_power
from ml4core_triton.kernels.target import units_of

MOST_SPLITS = 8
"""Programs that share a row of few heads in form 1, at most. On an H200, with 8 heads: 15.1 us in
form 0 against 26.9 at 8 rows (16 programs each), 81 against 82 at 64 rows (2).
"""
FEW_TILES = 8
"""Tiles of 16 heads, of all rows, up to which form 0 has them. On an H200, with 64 heads: 12.0 us
against 14.8 at 1 row.
"""


@dataclass(frozen=True)
class Tiling(attend_slots.Tiling):
    """Sizes of a launch.

    Attributes:
        form: 2 for ``warp_mla``, 1 for ``tile_mla``, 0 for ``attend_slots``.
        integers: in form 1, whether FP8 is decoded in integers, else by conversions.
        fetch: in form 1, whether a later tile of keys is asked for ahead.
    """

    form: int = 0
    integers: int = 0
    fetch: int = 1


def tiling(rows: int, heads: int, wide: bool, processors: int, arch: str = "sm_90") -> Tiling:
    """The sizes for ``rows`` of ``heads`` in form 0; a function of shapes alone.

    There is no tile of 32 heads: its accumulator doesn't fit the registers of the layout that the
    compiler gives it, and half a tile of 64 costs arithmetic, no bytes.
    """
    tile = 16 if wide or heads <= 16 or rows * -(-heads // 16) <= FEW_TILES else 64
    programs = max(1, rows * -(-heads // tile))
    splits = max(1, processors // programs)
    if wide:
        return Tiling(tile, 16, splits, 4, 2)
    if tile == 16:
        # A block is about what a program has of 2,048 keys: with a second one it would wait anew.
        return Tiling(tile, 32 if splits >= 64 else (64 if splits >= 32 else 128), splits, 8, 1)
    # Small blocks where there is more than one processor for each row, large ones for the matrix
    # units where all are busy. From sm_100 on accumulators lie in memory of their own, and what a
    # second stage keeps spills.
    block = 32 if programs < processors else 64
    return Tiling(tile, block, splits, 8, 2 if arch == "sm_90" else 1)


def filled(rows: int, heads: int, processors: int) -> Tiling:
    """The sizes in form 1.

    Tiles of 64 heads have tiles of 64 keys: decoded keys and queries take two thirds of shared
    memory. With fewer heads, keys are rows of the products, 128 for eight warps: too many for a
    row whose keys are shared by many programs, which are faster in form 0.
    """
    if rows * -(-heads // 16) <= FEW_TILES:
        return tiling(rows, heads, False, processors)
    tile = 64 if heads > tile_mla.KEY_MAJOR_HEADS else max(16, next_power(heads))
    programs = max(1, rows * -(-heads // tile))
    splits = max(1, processors // programs)
    if tile == 64:
        keys = 32 if splits > 32 else 64
        return Tiling(tile, keys, splits, 8, 1, form=1)
    if splits > MOST_SPLITS:
        return tiling(rows, heads, False, processors)
    # Eight warps have no registers to ask ahead for the rows of as many heads.
    return Tiling(tile, tile_mla.KEY_ROWS, splits, 8, 1, form=1, fetch=int(tile < 32))


def shared_out(rows: int, heads: int, processors: int) -> Tiling:
    """The sizes in form 2, or those of form 0 where they are faster: of the fewest rows of many
    heads, and of some rows of 16. On an H200, with 16 heads: 18.7 us against 16.6 at 8 rows, 8.9
    against 9.7 at 1.
    """
    tile = 64 if heads > 32 else max(8, next_power(heads))
    splits = max(1, processors // max(1, rows * -(-heads // tile)))
    few = tile == 64 and rows * -(-heads // 16) <= FEW_TILES
    if few or (tile == 16 and MOST_SPLITS < splits <= 4 * MOST_SPLITS):
        return tiling(rows, heads, False, processors)
    return Tiling(tile, 64, splits, 8, 1, form=2)


def shape_key(layout: str, rows: int, heads: int, keys: int) -> str:
    """The shape by which sizes are measured."""
    return f"{layout}, {heads} heads, {next_power(rows)} rows, {next_power(keys)} keys"


def sparse_mla(
    q: Tensor,
    cache: KVCache,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    *,
    ahead: bool = False,
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over the first lens [T] of slots int32 [T, k]: out [T, N, L] in q's dtype and
    lse fp32 [T, N], base e. Slots outside of the cache are skipped. A row without keys: 0 and -inf.

    bf16 queries meet bf16 keys, and weights are rounded to bf16; fp32 ones, and fp32 caches, meet
    in fp32. ``ahead``: launches may begin before the end of the one before them. ``ValueError``
    for a layout that isn't read.
    """
    count, heads, _ = q.shape
    parts, lses, joined = _parts(q, cache, slots, lens, scale, ahead)
    if len(parts) == 1:
        out, lse = parts[0], lses[0]
    else:
        out, lse = merge(parts, lses, q.dtype, ahead=joined)
    return out.view(count, heads, -1), lse.view(count, heads)


def attended_parts(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float, *, ahead: bool = False
) -> tuple[Tensor, Tensor]:
    """The same over parts of each row's keys, to be joined: [parts, T N, L], in q's dtype if there
    is one part and fp32 else, and [parts, T N].

    ``ahead``: the launch may begin before the end of the one before it.
    """
    parts, lses, _ = _parts(q, cache, slots, lens, scale, ahead)
    return parts, lses


def _parts(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float, ahead: bool = False
) -> tuple[Tensor, Tensor, bool]:
    """The parts, and whether the launch lets the next one come up."""
    keys = slots.shape[1]
    sizes = _sizes(q, cache, keys)
    if not sizes.form:
        plan = _plan(sizes)
        found = attend_slots.attended_parts(q, cache, slots, lens, scale, keys, plan, ahead=ahead)
        return *found, ahead
    q = q if q.stride(-1) == 1 else q.contiguous()
    slots = slots if slots.stride(-1) == 1 else slots.contiguous()
    given = q, cache, latent_rows(cache), slots, lens, scale, sizes.cut(keys)
    if sizes.form == 2:
        from ml4core_cuda.kernels import warp_mla

        return *warp_mla.launch(*given, heads=sizes.heads, ahead=ahead), True
    found = tile_mla.launch(
        *given,
        heads=sizes.heads,
        keys=sizes.keys,
        warps=sizes.warps,
        integers=bool(sizes.integers),
        fetch=bool(sizes.fetch),
        ahead=ahead,
    )
    return *found, True


def _sizes(q: Tensor, cache: KVCache, keys: int) -> Tiling:
    count, heads, _ = q.shape
    arch, units = arch_of(q.device), units_of(q.device)
    wide = torch.float32 in (q.dtype, cache.parts[0].dtype)
    sizes, most = tiling(count, heads, wide, units, arch), 0
    rows = latent_rows(cache)
    if arch == "sm_90" and tile_mla.serves(q, rows):
        most = 2 if rows.coded and gluon() else 1
        sizes = filled(count, heads, units)
        if most == 2:
            sizes = shared_out(count, heads, units)
    if wide:
        return sizes
    shape = shape_key(cache.layout.id, count, heads, keys)
    found = sizes_for("sparse_mla", device_name(q.device), shape, sizes)
    # Sizes of a form are measured with what it serves; the shape doesn't tell all of that.
    return found if found.form <= most else sizes


def _plan(sizes: Tiling) -> Plan:
    def plan(rows: LatentRows, wide: bool, codes: bool) -> Tiling:
        return sizes

    return plan
