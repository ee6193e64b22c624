"""``gather_kv``: decoded rows of a latent or index cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.kernels.keys import FP32, index_keys, key_scales, key_tile
from ml4core_rocm.kernels.latents import WIDE, latent_rows, row_offsets, row_tile
from ml4core_rocm.kernels.numeric import decoded, next_power

_ROWS = 16


@triton.jit
def gather_latents_kernel(
    rows,
    cache_scale,
    slots,
    out,
    count,
    all_slots,
    page_stride,
    row_stride,
    KIND: tl.constexpr,
    W: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A program decodes ``BK`` rows."""
    row = tl.program_id(0) * BK + tl.arange(0, BK)
    slot = tl.load(slots + row, row < count, other=-1)
    valid = (slot >= 0) & (slot < all_slots)
    offsets = row_offsets(tl.where(valid, slot, 0), BLOCK_SIZE, page_stride, row_stride)
    values = row_tile(rows, offsets, valid, KIND, 0, W, BW, tl.float32, False)
    if KIND != WIDE:
        values = values * tl.load(cache_scale)
    column = tl.arange(0, BW)
    fits = (row < count)[:, None] & (column < W)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * W + column[None, :], values, fits)


@triton.jit
def gather_keys_kernel(
    pages,
    slots,
    out,
    count,
    all_slots,
    page_stride,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A program decodes ``BK`` keys."""
    row = tl.program_id(0) * BK + tl.arange(0, BK)
    slot = tl.load(slots + row, row < count, other=-1)
    valid = (slot >= 0) & (slot < all_slots)
    slot = tl.where(valid, slot, 0)
    page = (slot // BLOCK_SIZE).to(tl.int64) * page_stride
    inside = slot % BLOCK_SIZE
    values = key_tile(pages, page, inside, valid, KIND, D, BD)
    if KIND != FP32:
        scale = key_scales(pages, page, inside, valid, D, BLOCK_SIZE)
        values = decoded(values, tl.float32, False) * scale[:, None]
    column = tl.arange(0, BD)
    fits = (row < count)[:, None] & (column < D)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * D + column[None, :], values, fits)


def gather_kv(cache: KVCache, slots: Tensor) -> Tensor:
    """Rows fp32 [..., width] of slots int32 [...]; zeros where a slot lies outside of the cache."""
    flat = slots.reshape(-1).contiguous()
    count, all_slots, width = len(flat), cache.blocks * cache.block_size, cache.layout.width
    out = torch.empty(count, width, dtype=torch.float32, device=slots.device)
    grid = (-(-count // _ROWS),)
    if count and cache.layout.role == "latent":
        rows = latent_rows(cache)
        gather_latents_kernel[grid](
            rows.rows,
            rows.scale,
            flat,
            out,
            count,
            all_slots,
            rows.page_stride,
            rows.row_stride,
            KIND=rows.kind,
            W=width,
            BK=_ROWS,
            BW=next_power(width),
            BLOCK_SIZE=cache.block_size,
            num_warps=4,
        )
    elif count:
        keys = index_keys(cache)
        gather_keys_kernel[grid](
            keys.pages,
            flat,
            out,
            count,
            all_slots,
            keys.page_stride,
            KIND=keys.kind,
            D=width,
            BK=_ROWS,
            BD=next_power(width),
            BLOCK_SIZE=cache.block_size,
            num_warps=4,
        )
    return out.view(*slots.shape, width)
