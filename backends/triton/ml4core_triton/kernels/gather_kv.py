"""``gather_kv``: decoded rows of a latent or index cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_triton.kernels.fp8 import decoded
from ml4core_triton.kernels.keys import FP32, index_keys, key_scales, key_tile
from ml4core_triton.kernels.latents import (
    latent_rows,
    latent_tile,
    rope_tile,
    row_offsets,
    row_scale,
)
from ml4core_triton.kernels.numeric import next_power

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
    latents = latent_tile(rows, offsets, valid, KIND, L, BK, BL, tl.float32, False)
    tails = rope_tile(rows, offsets, valid, KIND, L, R, BR, tl.float32, False)
    scale = row_scale(cache_scale, KIND)
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
    values = key_tile(pages, page, inside, valid, KIND, D, BD)
    if KIND != FP32:
        scale = key_scales(pages, page, inside, valid, KIND, D, BLOCK_SIZE)
        values = decoded(values, tl.float32, False) * scale[:, None]
    column = tl.arange(0, BD)
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
