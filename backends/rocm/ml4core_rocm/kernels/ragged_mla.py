"""Attention over one stream of slots, in which each row has a run of its own length: what layers
without rope take on a bf16 cache, whose rows the vendor's kernels read with a rope part only.

The kernel is that of ``sparse_mla``; queries of L values leave the rope part of rows unread.
"""

from __future__ import annotations

from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.kernels.sparse_mla import attend


def ragged_mla(
    q: Tensor, cache: KVCache, starts: Tensor, slots: Tensor, scale: float, keys: int
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over slots int32 [S], of which row t has those from starts[t] to starts
    [t + 1] - 1, int32 [T + 1]: out [T, N, L] in q's dtype and lse fp32 [T, N], base e.

    ``keys`` is what the launch is cut for: a row may have more, at a cost, or none: 0 and -inf.
    Slots outside of the cache are skipped. ``ValueError`` for a layout that isn't read.
    """
    if starts.shape != (q.shape[0] + 1,) or slots.dim() != 1:
        raise ValueError(
            f"{q.shape[0]} rows have starts [{q.shape[0] + 1}] and slots [S]; got "
            f"{list(starts.shape)} and {list(slots.shape)}"
        )
    return attend(q, cache, slots.contiguous(), starts, scale, keys, "bf16", ragged=True)
