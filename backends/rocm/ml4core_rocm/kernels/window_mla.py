"""``window_mla`` by the shared kernel, in sizes that AMD's registers hold: a wave has 512 of them
where four make a workgroup, and half where eight do, in which the sums of a tile spill.
"""

from __future__ import annotations

from torch import Tensor

from ml4core.api import KVCache
from ml4core_triton.kernels import window_mla as shared
from ml4core_triton.kernels.window_mla import Tiling


def window_mla(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See the shared kernel."""
    given = (q, cache, block_table, query_start, visible, max_rows, scale, window)
    return shared.window_mla(*given, measured=_sizes)


def _sizes(key: str, default: Tiling) -> Tiling:
    """Four warps, whatever the default is; half a tile where gfx942 decodes keys, which takes more
    there.
    """
    if default.warps == 4:
        return default
    return Tiling(16 if key.startswith("e4m3fnuz") else 32, 32, default.waves, 4, 2)
