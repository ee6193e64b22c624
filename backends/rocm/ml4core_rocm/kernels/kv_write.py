"""``kv_write``: a latent row a token, in the cache's layout."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.kernels.latents import E4M3FNUZ, WIDE, latent_rows, row_offsets
from ml4core_rocm.kernels.numeric import bf16_bits, fp8_code, next_power, rows_of, widen


@triton.jit
def _store(place, values, scale, mask, KIND: tl.constexpr):
    """Values of a row in the cache's numbers: FP8, bfloat16 to nearest, or fp32 as they are."""
    if KIND != WIDE:
        tl.store(place, fp8_code(tl.div_rn(values, scale), KIND == E4M3FNUZ), mask)
    elif place.dtype.element_ty == tl.bfloat16:
        tl.store(place.to(tl.pointer_type(tl.uint16)), bf16_bits(values), mask)
    else:
        tl.store(place, values, mask)


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
        scale = 1.0
        if KIND != WIDE:
            scale = tl.load(cache_scale)
        _store(start + column, x, scale, column < L, KIND)
        _store(start + (tail + L), pe, scale, tail < R, KIND)


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
        BL=next_power(rows.latent),
        BR=next_power(rows.rope),
        HAS_ROPE=rope is not None and rows.rope > 0,
        BLOCK_SIZE=cache.block_size,
        num_warps=1,
    )
