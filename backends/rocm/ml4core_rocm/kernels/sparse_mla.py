"""``sparse_mla``: attention of absorbed queries over chosen slots of a latent cache.

The kernel is ``attend_slots``. The 8 or 16 heads of a rank fill one tile.

Rate model (MI350X, 8 TB/s; 16 heads, 2,048 keys): 1.18 MB a row, 0.15 us; 72 MFLOP. At 64 rows
75 MB, 9.4 us, and 4.6 GFLOP, 2.0 us in bf16.
"""

from __future__ import annotations

from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.kernels.target import arch_of
from ml4core_triton.kernels import attend_slots
from ml4core_triton.kernels.attend_slots import Precision, Tiling
from ml4core_triton.kernels.latents import LatentRows
from ml4core_triton.kernels.target import units_of


def tiling(
    rows: int, heads: int, wide: bool, fp8: bool, codes: bool, units: int, arch: str
) -> Tiling:
    """The sizes for ``rows`` of ``heads``; a function of shapes alone.

    ``fp8``: whether the cache is; ``codes``: whether its codes meet queries as they are. What the
    compiler gives of registers decides: a wave holds the queries of its tile whole, so 64 heads
    spill, and so do 64 keys of 512 in bf16 beside 32 heads, and on gfx942 beside 16.
    """
    tile = 16 if wide or heads <= 16 else 32
    programs = max(1, rows * -(-heads // tile))
    many = fp8 and tile == 16 and (codes or arch != "gfx942")
    block = 16 if wide else (64 if many else 32)
    return Tiling(tile, block, max(1, units // programs), 4, 2)


def sparse_mla(
    q: Tensor,
    cache: KVCache,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    *,
    precision: Precision = "bf16",
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over the first lens [T] of slots int32 [T, k]: out [T, N, L] in q's dtype and
    lse fp32 [T, N], base e. Slots outside of the cache are skipped. A row without keys: 0 and -inf.

    bf16 queries meet bf16 and FP8 keys in ``precision``, and weights are rounded to it; fp32 ones,
    and fp32 caches, meet in fp32. ``ValueError`` for a layout that isn't read.
    """
    return attend(q, cache, slots, lens, scale, slots.shape[1], precision, ragged=False)


def attend(
    q: Tensor,
    cache: KVCache,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    keys: int,
    precision: Precision,
    *,
    ragged: bool,
) -> tuple[Tensor, Tensor]:
    """``sparse_mla``, or with ``ragged`` that of one stream of slots, ``lens`` being where each
    row's begin, [T + 1], and ``keys`` what most rows have at most.
    """

    def plan(rows: LatentRows, wide: bool, codes: bool) -> Tiling:
        count, heads, _ = q.shape
        units, arch = units_of(q.device), arch_of(q.device)
        return tiling(count, heads, wide, rows.coded, codes, units, arch)

    return attend_slots.attended(
        q, cache, slots, lens, scale, keys, plan, precision=precision, ragged=ragged
    )
