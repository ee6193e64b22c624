"""``indexer_write``: an index key a token, in the cache's layout."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.kernels.keys import FP32, PLANAR_F32, index_keys
from ml4core_cuda.kernels.numeric import e4m3_code, finite_size, next_power, rows_of
from ml4core_cuda.kernels.row_scales import power_of_two, scale_exponent, widen

AMAX_FLOOR = tl.constexpr(1e-4)
"""The least magnitude that a scale of index keys and queries is made for."""


@triton.jit
def write_key(
    start, inside, x, column, KIND: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Stores a key ``x`` fp32 [BD] as token ``inside`` of the page at ``start``."""
    if KIND == FP32:
        tl.store(start + inside * D + column, x, column < D)
    else:
        amax = tl.maximum(tl.max(finite_size(x), 0), AMAX_FLOOR)
        exponent = scale_exponent(amax)
        tl.store(start + inside * D + column, e4m3_code(x * power_of_two(-exponent)), column < D)
        place = start + (BLOCK_SIZE * D + 4 * inside)
        if KIND == PLANAR_F32:
            tl.store(place.to(tl.pointer_type(tl.float32)), power_of_two(exponent))
        else:
            tl.store(place.to(tl.pointer_type(tl.int32)), (exponent + 127) * 0x01010101)


@triton.jit
def indexer_write_kernel(
    pages,
    slots,
    keys,
    all_slots,
    page_stride,
    key_stride,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A program writes one token's key."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < all_slots):
        start = pages + (slot // BLOCK_SIZE).to(tl.int64) * page_stride
        inside = slot % BLOCK_SIZE
        column = tl.arange(0, BD)
        x = widen(tl.load(keys + token * key_stride + column, column < D, other=0.0))
        write_key(start, inside, x, column, KIND, D, BLOCK_SIZE)


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
    indexer_write_kernel[(len(slots),)](
        keys.pages,
        slots.contiguous(),
        key,
        cache.blocks * cache.block_size,
        keys.page_stride,
        key.stride(0),
        KIND=keys.kind,
        D=keys.width,
        BD=next_power(keys.width),
        BLOCK_SIZE=cache.block_size,
        num_warps=1,
    )
