"""``gather_kv``: decoded rows of a latent or index cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.kernels.keys import FP32, index_keys, key_scales
from ml4core_cuda.kernels.latents import E4M3, latent_rows, latent_tile, rope_tile, row_offsets
from ml4core_cuda.kernels.numeric import e4m3, next_power

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
    L: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    BR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A program decodes ``BK`` rows."""
    row = tl.program_id(0) * BK + tl.arange(0, BK)
    slot = tl.load(slots + row, row < count, other=-1)
    valid = (slot >= 0) & (slot < all_slots)
    offsets = row_offsets(tl.where(valid, slot, 0), BLOCK_SIZE, page_stride, row_stride)
    latents = latent_tile(rows, offsets, valid, KIND, L, BK, BL, tl.float32)
    tails = rope_tile(rows, offsets, valid, KIND, L, R, BR, tl.float32)
    if KIND == E4M3:
        scale = tl.load(cache_scale)
        latents = latents * scale
        tails = tails * scale
    column = tl.arange(0, BL)
    tail = tl.arange(0, BR)
    start = out + row.to(tl.int64)[:, None] * (L + R)
    fits = (row < count)[:, None]
    tl.store(start + column[None, :], latents, fits & (column < L)[None, :])
    tl.store(start + (tail + L)[None, :], tails, fits & (tail < R)[None, :])


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
    column = tl.arange(0, BD)
    mask = valid[:, None] & (column < D)[None, :]
    stored = tl.load(pages + (page + inside * D)[:, None] + column[None, :], mask, other=0)
    if KIND == FP32:
        values = stored
    else:
        scale = key_scales(pages, page, inside, valid, KIND, D, BLOCK_SIZE)
        values = e4m3(stored, tl.float32) * scale[:, None]
    fits = (row < count)[:, None] & (column < D)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * D + column[None, :], values, fits)


def gather_kv(cache: KVCache, slots: Tensor) -> Tensor:
    """Rows fp32 [..., width] of slots int32 [...]; zeros where a slot lies outside of the cache."""
    flat = slots.reshape(-1).contiguous()
    count, all_slots = len(flat), cache.blocks * cache.block_size
    out = torch.empty(count, cache.layout.width, dtype=torch.float32, device=slots.device)
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
            L=rows.latent,
            R=rows.rope,
            BK=_ROWS,
            BL=max(128, next_power(rows.latent)),
            BR=next_power(rows.rope),
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
            D=keys.width,
            BK=_ROWS,
            BD=next_power(keys.width),
            BLOCK_SIZE=cache.block_size,
            num_warps=4,
        )
    return out.view(*slots.shape, cache.layout.width)
