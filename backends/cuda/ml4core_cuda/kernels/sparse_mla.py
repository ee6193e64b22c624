"""``sparse_mla``: attention of absorbed queries over chosen slots of a latent cache.

A program takes one row, a tile of its heads and a part of its keys; where there are too few of
these for the device, keys are split further and the parts joined by ``merge_lse``. A tile has 16
heads at least, which is the least that the matrix units take: below, its spare rows cost no bytes,
and a row's keys are what decoding is about.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.kernels.attend import LOG2E, attend_keys, finished, product_dtype
from ml4core_cuda.kernels.latents import E4M3, latent_rows, row_offsets
from ml4core_cuda.kernels.merge_lse import merge
from ml4core_cuda.kernels.numeric import (
    dependent,
    let_next_begin,
    narrow,
    next_power,
    sm_count,
    wait_for_previous,
)
from ml4core_cuda.kernels.target import arch_of, device_name
from ml4core_cuda.tuned import sizes_for


@dataclass(frozen=True)
class Tiling:
    """Sizes of a launch.

    Attributes:
        heads: heads of a tile.
        keys: keys of a block.
        splits: parts that a row's keys are cut into, if there are so many blocks.
    """

    heads: int
    keys: int
    splits: int
    warps: int
    stages: int

    def cut(self, keys: int) -> tuple[int, int]:
        """How many parts there are, and the keys of each: whole blocks."""
        blocks = max(1, -(-keys // self.keys))
        chunk = -(-blocks // max(1, min(self.splits, blocks))) * self.keys
        return -(-max(keys, 1) // chunk), chunk


def tiling(rows: int, heads: int, wide: bool, processors: int, arch: str = "sm_90") -> Tiling:
    """The sizes for ``rows`` of ``heads``; a function of shapes alone.

    There is no tile of 32 heads: its accumulator doesn't fit the registers of the layout that the
    compiler gives it, and half a tile of 64 costs arithmetic, no bytes.
    """
    tile = 16 if wide or heads <= 16 else 64
    programs = max(1, rows * -(-heads // tile))
    # Small blocks where there is more than one processor for each row, large ones for the matrix
    # units where all are busy.
    block = 16 if wide else (32 if tile == 64 and programs < processors else 64)
    warps = 8 if tile == 64 else 4
    # From sm_100 on accumulators lie in memory of their own, and what a second stage keeps spills.
    stages = 1 if tile == 64 and arch != "sm_90" else 2
    return Tiling(tile, block, max(1, processors // programs), warps, stages)


def shape_key(layout: str, rows: int, heads: int, keys: int) -> str:
    """The shape by which sizes are measured."""
    return f"{layout}, {heads} heads, {next_power(rows)} rows, {next_power(keys)} keys"


@triton.jit
def sparse_mla_kernel(
    q,
    rows,
    cache_scale,
    slots,
    lens,
    out,
    lse,
    softmax_factor,
    keys,
    all_slots,
    splits,
    chunk,
    page_stride,
    row_stride,
    q_row_stride,
    q_head_stride,
    slots_stride,
    out_split_stride,
    lse_split_stride,
    N: tl.constexpr,
    KIND: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BL: tl.constexpr,
    BR: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    # Splits of one row stand together, so that its queries are read once into L2.
    program = tl.program_id(0)
    row = (program // splits).to(tl.int64)
    split = program % splits
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    column = tl.arange(0, BL)
    q_row = q + row * q_row_stride + head[:, None] * q_head_stride
    q_latent = tl.load(
        q_row + column[None, :], mask=(head < N)[:, None] & (column < L)[None, :], other=0.0
    )
    q_latent = narrow(q_latent.to(tl.float32), DTYPE) if q_latent.dtype != DTYPE else q_latent
    q_rope = q_latent
    if HAS_ROPE:
        tail = tl.arange(0, BR)
        q_rope = tl.load(
            q_row + L + tail[None, :], mask=(head < N)[:, None] & (tail < R)[None, :], other=0.0
        )
        q_rope = narrow(q_rope.to(tl.float32), DTYPE) if q_rope.dtype != DTYPE else q_rope
    key_scale = 1.0
    if KIND == E4M3:
        key_scale = tl.load(cache_scale)
    factor = softmax_factor * key_scale
    top = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    summed = tl.zeros((BH, BL), tl.float32)
    first = split * chunk
    last = tl.minimum(first + chunk, tl.minimum(tl.load(lens + row), keys))
    for start in range(first, last, BK):
        index = start + tl.arange(0, BK)
        slot = tl.load(slots + row * slots_stride + index, mask=index < last, other=-1)
        # Unsigned, where a negative one lies behind all: every register counts here.
        place = slot.to(tl.uint32, bitcast=True)
        valid = place < all_slots
        offsets = row_offsets(tl.where(valid, place, 0), BLOCK_SIZE, page_stride, row_stride)
        top, total, summed = attend_keys(
            q_latent,
            q_rope,
            rows,
            offsets,
            valid,
            valid[None, :],
            factor,
            top,
            total,
            summed,
            KIND,
            L,
            R,
            BH,
            BK,
            BL,
            BR,
            HAS_ROPE,
        )
    summed, own_lse = finished(top, total, summed)
    summed = summed * key_scale
    target = out + split * out_split_stride + (row * N + head[:, None]) * L + column[None, :]
    tl.store(
        target,
        narrow(summed, out.dtype.element_ty),
        mask=(head < N)[:, None] & (column < L)[None, :],
    )
    tl.store(lse + split * lse_split_stride + row * N + head, own_lse, mask=head < N)


def sparse_mla(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over the first lens [T] of slots int32 [T, k]: out [T, N, L] in q's dtype and
    lse fp32 [T, N], base e. Slots outside of the cache are skipped. A row without keys: 0 and -inf.

    bf16 queries meet bf16 keys, and weights are rounded to bf16; fp32 ones, and fp32 caches, meet
    in fp32. ``ValueError`` for a layout that isn't read.
    """
    count, heads, _ = q.shape
    parts, lses = attended_parts(q, cache, slots, lens, scale)
    out, lse = (parts[0], lses[0]) if len(parts) == 1 else merge(parts, lses, q.dtype)
    return out.view(count, heads, -1), lse.view(count, heads)


def attended_parts(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float, *, ahead: bool = False
) -> tuple[Tensor, Tensor]:
    """The same over parts of each row's keys, to be joined: [parts, T N, L], in q's dtype if there
    is one part and fp32 else, and [parts, T N].

    ``ahead``: the launch may begin before the end of the one before it.
    """
    rows = latent_rows(cache)
    count, heads, width = q.shape
    if width not in (rows.latent, rows.latent + rows.rope):
        raise ValueError(
            f"queries have {width} values; keys of {cache.layout.id!r} have {rows.latent} and "
            f"{rows.rope} of rope"
        )
    if q.stride(-1) != 1:
        q = q.contiguous()
    if slots.stride(-1) != 1:
        slots = slots.contiguous()
    dtype = product_dtype(q, rows.rows)
    keys = slots.shape[1]
    wide, device = dtype == torch.float32, q.device
    sizes = tiling(count, heads, wide, sm_count(device), arch_of(device))
    if not wide:
        shape = shape_key(cache.layout.id, count, heads, keys)
        sizes = sizes_for("sparse_mla", device_name(device), shape, sizes)
    splits, chunk = sizes.cut(keys)
    alone = splits == 1
    parts = torch.empty(
        splits,
        count * heads,
        rows.latent,
        dtype=q.dtype if alone else torch.float32,
        device=q.device,
    )
    lses = torch.empty(splits, count * heads, dtype=torch.float32, device=q.device)
    if count:
        sparse_mla_kernel[(count * splits, -(-heads // sizes.heads))](
            q,
            rows.rows,
            rows.scale,
            slots,
            lens.contiguous(),
            parts,
            lses,
            scale * LOG2E,
            keys,
            cache.blocks * cache.block_size,
            splits,
            chunk,
            rows.page_stride,
            rows.row_stride,
            q.stride(0),
            q.stride(1),
            slots.stride(0),
            parts.stride(0),
            lses.stride(0),
            N=heads,
            KIND=rows.kind,
            L=rows.latent,
            R=rows.rope,
            BL=max(16, next_power(rows.latent)),
            BR=max(16, next_power(rows.rope)),
            HAS_ROPE=width > rows.latent,
            BH=sizes.heads,
            BK=sizes.keys,
            BLOCK_SIZE=cache.block_size,
            DTYPE=triton_dtype(dtype),
            num_warps=sizes.warps,
            DEPENDENT=ahead,
            num_stages=sizes.stages,
            **dependent(ahead),
        )
    return parts, lses


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float32 if dtype == torch.float32 else tl.bfloat16
