"""``kv_write``: a latent row a token, in the cache's layout."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_triton.kernels.fp8 import fp8_code
from ml4core_triton.kernels.latents import DS_MLA, E4M3FNUZ, WIDE, latent_rows, row_offsets
from ml4core_triton.kernels.numeric import (
    bf16_bits,
    finite_size,
    next_power,
    power_of_two,
    rows_of,
    scale_exponent,
    widen,
)

_SCALED = tl.constexpr(128)
_LEAST_EXPONENT = tl.constexpr(-13)
"""A scale of fp8_ds_mla is 1e-4 at least; this is the least power of two not below it."""


@triton.jit
def _store_wide(place, values, mask):
    """Values in the dtype of the cache: fp32 as they are, bfloat16 to nearest."""
    if place.dtype.element_ty == tl.bfloat16:
        tl.store(place.to(tl.pointer_type(tl.uint16)), bf16_bits(values), mask)
    else:
        tl.store(place, values, mask)


@triton.jit
def write_row(
    start, x, pe, cache_scale, column, tail, KIND: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """Stores a latent ``x`` fp32 [BL] and its rope part ``pe`` fp32 [BR] as the row at ``start``;
    ``column`` and ``tail`` count them.
    """
    if KIND == DS_MLA:
        group = tl.arange(0, BL // _SCALED)
        grouped = tl.reshape(x, (BL // _SCALED, _SCALED))
        exponent = scale_exponent(tl.max(finite_size(grouped), 1))
        exponent = tl.maximum(exponent, _LEAST_EXPONENT)
        scaled = grouped * power_of_two(-exponent)[:, None]
        tl.store(start + column, fp8_code(tl.reshape(scaled, (BL,)), False), column < L)
        scales = (start + (4 * group + L)).to(tl.pointer_type(tl.float32))
        tl.store(scales, power_of_two(exponent), group < L // _SCALED)
        place = start + (2 * tail + L + 4 * (L // _SCALED))
        tl.store(place.to(tl.pointer_type(tl.uint16)), bf16_bits(pe), tail < R)
    elif KIND != WIDE:
        scale = tl.load(cache_scale)
        tl.store(start + column, fp8_code(tl.div_rn(x, scale), KIND == E4M3FNUZ), column < L)
        tl.store(start + (tail + L), fp8_code(tl.div_rn(pe, scale), KIND == E4M3FNUZ), tail < R)
    else:
        _store_wide(start + column, x, column < L)
        _store_wide(start + (tail + L), pe, tail < R)


@triton.jit
def kv_write_kernel(
    rows,
    cache_scale,
    slots,
    latent,
    rope,
    all_slots,
    page_stride,
    row_stride,
    latent_stride,
    rope_stride,
    KIND: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BL: tl.constexpr,
    BR: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """A program writes one token's row."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < all_slots):
        start = rows + row_offsets(slot, BLOCK_SIZE, page_stride, row_stride)
        column = tl.arange(0, BL)
        tail = tl.arange(0, BR)
        x = widen(tl.load(latent + token * latent_stride + column, column < L, other=0.0))
        pe = tl.zeros((BR,), tl.float32)
        if HAS_ROPE:
            pe = widen(tl.load(rope + token * rope_stride + tail, tail < R, other=0.0))
        write_row(start, x, pe, cache_scale, column, tail, KIND, L, R, BL)


def kv_write(cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor | None = None) -> None:
    """Writes ``latent`` [T, L] and ``rope`` [T, R] (None: zeros) to slots int64 [T]. A slot outside
    of the cache writes nothing. ``ValueError`` for a layout that isn't served.
    """
    rows = latent_rows(cache)
    latent = rows_of(latent)
    tail = latent if rope is None else rows_of(rope)
    if latent.shape[1] != rows.latent or (rope is not None and tail.shape[1] != rows.rope):
        given = [list(latent.shape), None if rope is None else list(tail.shape)]
        raise ValueError(
            f"rows of {cache.layout.id!r} have {rows.latent} latents and {rows.rope} rope values, "
            f"got {given}"
        )
    if not len(slots):
        return
    kv_write_kernel[(len(slots),)](
        rows.rows,
        rows.scale,
        slots.contiguous(),
        latent,
        tail,
        cache.blocks * cache.block_size,
        rows.page_stride,
        rows.row_stride,
        latent.stride(0),
        tail.stride(0),
        KIND=rows.kind,
        L=rows.latent,
        R=rows.rope,
        BL=max(128, next_power(rows.latent)),
        BR=next_power(rows.rope),
        HAS_ROPE=rope is not None and rows.rope > 0,
        BLOCK_SIZE=cache.block_size,
        num_warps=1,
    )
