"""``indexer_logits``: scores of the lightning indexer over paged keys.

The kernel is ``score_keys``. Codes go from the cache to the matrix units of gfx950 as they are;
gfx942, whose units don't take e4m3fn, has them in float16. So has Hopper, where the sources are
checked: its FP8 products keep too few bits of a sum for the contract.

Rate model (MI350X, 8 TB/s; 32 heads): 132 bytes and 8,192 operations a key and row, so that bytes
count up to some 30 rows a request. 64k keys of one row are 8.7 MB, 1.1 us.
"""

from __future__ import annotations

from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.kernels.target import exact_fp8_products
from ml4core_triton.kernels import score_keys
from ml4core_triton.kernels.score_keys import Tiling


def tiling(wide: bool) -> Tiling:
    """The sizes, by whether operands are fp32."""
    return Tiling(32, 64, 4, 4, 2) if wide else Tiling(64, 128, 4, 4, 2)


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
) -> Tensor:
    """Scores fp32 [T, S] of queries [T, Hi, D] with weights fp32 [T, Hi]; -inf where a row doesn't
    see. ``ValueError`` for a layout that isn't served.
    """
    return scores(q, weights, scale, cache, block_table, query_start, visible, max_rows, fill=True)


def scores(
    q: Tensor,
    weights: Tensor,
    scale: float,
    cache: KVCache,
    block_table: Tensor,
    query_start: Tensor,
    visible: Tensor,
    max_rows: int,
    *,
    fill: bool,
) -> Tensor:
    """``indexer_logits``; without ``fill``, what a row doesn't see is left as the memory was."""
    given = (q, weights, scale, cache, block_table, query_start, visible, max_rows)
    return score_keys.scores(*given, tiling, codes=exact_fp8_products(q.device), fill=fill)
