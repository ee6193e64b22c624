"""``indexer_write``: an index key a token, in the cache's layout."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_triton.kernels.keys import index_keys, store_keys
from ml4core_triton.kernels.numeric import next_power, rows_of, widen
from ml4core_triton.kernels.target import target_of


@triton.jit
def indexer_write_kernel(
    pages,
    slots,
    keys,
    count,
    all_slots,
    page_stride,
    key_stride,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program writes ``ROWS`` tokens' keys."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token, token < count, other=-1)
    valid = (slot >= 0) & (slot < all_slots)
    column = tl.arange(0, BD)
    place = keys + token.to(tl.int64)[:, None] * key_stride + column[None, :]
    x = widen(tl.load(place, valid[:, None] & (column < D)[None, :], other=0.0))
    slot = tl.where(valid, slot, 0)
    store_keys(pages, slot, valid, x, page_stride, KIND, D, BD, BLOCK_SIZE)


def indexer_write(cache: KVCache, slots: Tensor, key: Tensor) -> None:
    """Writes ``key`` [T, D] to slots int64 [T]. A slot outside of the cache writes nothing.
    ``ValueError`` for a layout that isn't served.
    """
    keys = index_keys(cache)
    key = rows_of(key)
    if key.shape[1] != keys.width:
        raise ValueError(
            f"keys of {cache.layout.id!r} have {keys.width} values, got {list(key.shape)}"
        )
    if not len(slots):
        return
    many = max(1, target_of(key.device).lanes // 16)  # two lines of 4 bytes a lane
    indexer_write_kernel[(-(-len(slots) // many),)](
        keys.pages,
        slots.contiguous(),
        key,
        len(slots),
        cache.blocks * cache.block_size,
        keys.page_stride,
        key.stride(0),
        KIND=keys.kind,
        D=keys.width,
        BD=next_power(keys.width),
        BLOCK_SIZE=cache.block_size,
        ROWS=many,
        num_warps=1,
    )
