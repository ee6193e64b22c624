"""``indexer_logits``: scores of the lightning indexer over paged keys.

The kernel is ``score_keys``, or on Hopper ``page_logits`` where pages are of 64 keys. Codes meet in
float16: E4M3's own matrix instruction keeps too few bits of a sum for the contract.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.capabilities import KEYS
from ml4core_cuda.kernels.page_logits import PAGE, WIDTH, page_logits_kernel
from ml4core_cuda.kernels.target import arch_of, device_name
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels import score_keys
from ml4core_triton.kernels.keys import PLANAR, index_keys
from ml4core_triton.kernels.numeric import next_power

_COLUMNS = 256
"""Rows times heads of a tile at most."""


@dataclass(frozen=True)
class Tiling(score_keys.Tiling):
    """Sizes of a launch.

    Attributes:
        paged: 1 for ``page_logits``, whose tile of keys is a page; 0 for ``score_keys``.
    """

    paged: int = 0


def tiling(heads: int, max_rows: int, wide: bool) -> Tiling:
    """The default sizes, by shapes alone."""
    if wide:
        return Tiling(32, 64, 4, 4, 3)
    small = next_power(heads) * next_power(max_rows) <= 64
    return Tiling(128 if small else 64, _COLUMNS, 4, 4 if small else 8, 3)


def shape_key(rows: int, heads: int, columns: int, max_rows: int) -> str:
    """The shape by which sizes are measured."""
    each = f"{min(8, next_power(max_rows))} rows a request"
    return f"{heads} heads, {next_power(rows)} rows of {next_power(columns)}, {each}"


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
    ahead: bool = False,
) -> Tensor:
    """``indexer_logits``; without ``fill``, what a row doesn't see is left as the memory was.
    ``ahead``: the launch may begin before the end of the one before it.
    """
    cache.require(*KEYS)
    rows, heads, width = q.shape
    columns = block_table.shape[1] * cache.block_size
    keys = index_keys(cache)
    paged = keys.kind == PLANAR.value and (cache.block_size, width) == (PAGE, WIDTH)
    paged = paged and arch_of(q.device) == "sm_90"

    def plan(wide: bool) -> Tiling:
        sizes = tiling(heads, max_rows, wide)
        if wide:
            return sizes
        if paged:
            sizes = Tiling(PAGE, _COLUMNS, 4, 4 if heads * max_rows <= 64 else 8, 1, paged=1)
        shape = shape_key(rows, heads, columns, max_rows)
        found = sizes_for("indexer_logits", device_name(q.device), shape, sizes)
        # Sizes of pages are measured with what they serve; the shape doesn't tell all of that.
        return found if found.paged <= sizes.paged else sizes

    def kernel(sizes: score_keys.Tiling) -> object:
        own = isinstance(sizes, Tiling) and sizes.paged
        return page_logits_kernel if own else score_keys.indexer_logits_kernel

    given = (q, weights, scale, cache, block_table, query_start, visible, max_rows)
    return score_keys.scores(*given, plan, codes=False, fill=fill, ahead=ahead, kernel=kernel)
