"""``window_mla``: attention of absorbed queries over the latest keys of their request, with the
sizes that were measured on the device.
"""

from __future__ import annotations

from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.kernels.target import device_name
from ml4core_cuda.tuned import sizes_for
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
    """``q`` [T, N, W] over keys max(0, visible - window) .. visible - 1 of each row's request: out
    [T, N, L] in q's dtype and lse fp32 [T, N], base e; 0 and -inf without keys. Numbers are those
    of ``sparse_mla``. ``ValueError`` for a layout that isn't read.
    """

    def measured(shape: str, default: Tiling) -> Tiling:
        return sizes_for("window_mla", device_name(q.device), shape, default)

    given = (q, cache, block_table, query_start, visible, max_rows, scale, window)
    return shared.window_mla(*given, measured=measured)
