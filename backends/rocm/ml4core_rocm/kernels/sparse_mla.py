"""``sparse_mla``: attention of absorbed queries over chosen slots of a latent cache.

A program takes one row, a tile of its heads and a part of its keys; where there are too few of
these for the device, keys are split further and the parts joined by ``merge_lse``. The 8 or 16
heads of a rank fill one tile: heads that aren't there are masked in registers, no query is padded
or copied to FP8 in memory, and nothing is planned ahead: a launch depends on shapes alone.

``precision`` says in what queries meet the keys of an FP8 cache. ``bf16`` is exact but for the
rounding of weights: codes are decoded on the way. ``fp8`` quantises a row's head in registers, its
scale its largest magnitude over 448 (224 in e4m3fnuz), and weights of keys too, so that codes go
from the cache to the matrix units as they are.

Rate model (MI350X, 8 TB/s; 16 heads, 2,048 keys): 1.18 MB a row, 0.15 us; 72 MFLOP. At 64 rows
75 MB, 9.4 us, and 4.6 GFLOP, 2.0 us in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_rocm.kernels.attend import LOG2E, attend_keys, finished, product_dtype
from ml4core_rocm.kernels.latents import E4M3FNUZ, WIDE, latent_rows, row_offsets
from ml4core_rocm.kernels.merge_lse import merge
from ml4core_rocm.kernels.numeric import (
    finite_size,
    fp8_rounded,
    narrow,
    next_power,
    triton_dtype,
    widen,
)
from ml4core_rocm.kernels.target import arch_of, compute_units

Precision = Literal["bf16", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8")


@dataclass(frozen=True)
class Tiling:
    """Sizes of a launch.

    Attributes:
        heads: heads of a tile.
        keys: keys of a block.
        splits: parts of a row's keys, each of ``chunk`` slots.
    """

    heads: int
    keys: int
    splits: int
    chunk: int
    warps: int
    stages: int


def tiling(
    rows: int, heads: int, keys: int, wide: bool, fp8: bool, codes: bool, units: int, arch: str
) -> Tiling:
    """The sizes for ``rows`` of ``heads`` over up to ``keys``; a function of shapes alone.

    ``fp8``: whether the cache is; ``codes``: whether its codes meet queries as they are. What the
    compiler gives of registers decides: a wave holds the queries of its tile whole, so 64 heads
    spill, and so do 64 keys of 512 in bf16 beside 32 heads, and on gfx942 beside 16.
    """
    tile = 16 if wide or heads <= 16 else 32
    programs = max(1, rows * -(-heads // tile))
    many = fp8 and tile == 16 and (codes or arch != "gfx942")
    block = 16 if wide else (64 if many else 32)
    blocks = max(1, -(-keys // block))
    splits = max(1, min(blocks, units // programs))
    chunk = -(-blocks // splits) * block
    return Tiling(tile, block, -(-max(keys, 1) // chunk), chunk, 4, 2)


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
    CODES: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Row t's slots are the first ``lens[t]`` of row t of ``slots``; where ``RAGGED``, those from
    ``lens[t]`` to ``lens[t + 1]`` of all.
    """
    # Splits of one row stand together, so that its queries are read once into L2.
    program = tl.program_id(0)
    row = (program // splits).to(tl.int64)
    split = program % splits
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    column = tl.arange(0, BL)
    tail = tl.arange(0, BR)
    known_head = (head < N)[:, None]
    q_row = q + row * q_row_stride + head[:, None] * q_head_stride
    q_latent = tl.load(q_row + column[None, :], known_head & (column < L)[None, :], other=0.0)
    q_rope = q_latent
    if HAS_ROPE:
        q_rope = tl.load(q_row + (tail + L)[None, :], known_head & (tail < R)[None, :], other=0.0)
    key_scale = 1.0
    if KIND != WIDE:
        key_scale = tl.load(cache_scale)
    factor = tl.zeros((BH,), tl.float32) + softmax_factor * key_scale
    if CODES:
        most: tl.constexpr = 224.0 if KIND == E4M3FNUZ else 448.0
        wide_latent = widen(q_latent)
        amax = tl.max(finite_size(wide_latent), 1)
        if HAS_ROPE:
            wide_rope = widen(q_rope)
            amax = tl.maximum(amax, tl.max(finite_size(wide_rope), 1))
        q_scale = tl.maximum(amax, 1e-10) / most
        q_latent = fp8_rounded(wide_latent / q_scale[:, None], KIND == E4M3FNUZ)
        q_rope = q_latent
        if HAS_ROPE:
            q_rope = fp8_rounded(wide_rope / q_scale[:, None], KIND == E4M3FNUZ)
        factor = factor * q_scale
    else:
        q_latent = narrow(widen(q_latent), DTYPE) if q_latent.dtype != DTYPE else q_latent
        q_rope = narrow(widen(q_rope), DTYPE) if q_rope.dtype != DTYPE else q_rope
    top = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    summed = tl.zeros((BH, BL), tl.float32)
    if RAGGED:
        begin = tl.load(lens + row)
        length = tl.load(lens + row + 1) - begin
        slots += begin
    else:
        length = tl.minimum(tl.load(lens + row), keys)
        slots += row * slots_stride
    first = split * chunk
    last = tl.minimum(first + chunk, length)
    if RAGGED:
        # The last split takes what a row has above the bound that the chunks are made for.
        last = tl.where(split == splits - 1, length, last)
    for start in range(first, last, BK):
        index = start + tl.arange(0, BK)
        slot = tl.load(slots + index, mask=index < last, other=-1)
        valid = (slot >= 0) & (slot < all_slots)
        offsets = row_offsets(tl.where(valid, slot, 0), BLOCK_SIZE, page_stride, row_stride)
        top, total, summed = attend_keys(
            q_latent,
            q_rope,
            rows,
            offsets,
            valid,
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
            DTYPE,
            CODES,
        )
    summed, own_lse = finished(top, total, summed, CODES)
    place = out + split * out_split_stride + (row * N + head[:, None]) * L + column[None, :]
    values = narrow(summed * key_scale, out.dtype.element_ty)
    tl.store(place, values, mask=known_head & (column < L)[None, :])
    tl.store(lse + split * lse_split_stride + row * N + head, own_lse, mask=head < N)


def sparse_mla(
    q: Tensor,
    cache: KVCache,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    *,
    precision: Precision = "bf16",
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over the first lens [T] of slots int32 [T, k]: out [T, N, L] in q's dtype and
    lse fp32 [T, N], base e. Slots outside of the cache are skipped. A row without keys: 0 and -inf.

    bf16 queries meet bf16 and FP8 keys in ``precision``, and weights are rounded to it; fp32 ones,
    and fp32 caches, meet in fp32. ``ValueError`` for a layout that isn't read.
    """
    slots = slots if slots.stride(-1) == 1 else slots.contiguous()
    return attend(q, cache, slots, lens, scale, slots.shape[1], precision, ragged=False)


def attend(
    q: Tensor,
    cache: KVCache,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    keys: int,
    precision: Precision,
    *,
    ragged: bool,
) -> tuple[Tensor, Tensor]:
    """``sparse_mla``, or with ``ragged`` that of one stream of slots, ``lens`` being where each
    row's begin, [T + 1], and ``keys`` what most rows have at most.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
    rows = latent_rows(cache)
    count, heads, width = q.shape
    if width not in (rows.latent, rows.latent + rows.rope):
        raise ValueError(
            f"queries have {width} values; keys of {cache.layout.id!r} have {rows.latent} and "
            f"{rows.rope} of rope"
        )
    if q.stride(-1) != 1:
        q = q.contiguous()
    dtype = product_dtype(q, rows.rows)
    device, wide = q.device, dtype == torch.float32
    fp8 = rows.kind != WIDE.value
    codes = precision == "fp8" and fp8 and not wide
    units, arch = compute_units(device), arch_of(device)
    sizes = tiling(count, heads, keys, wide, fp8, codes, units, arch)
    alone = sizes.splits == 1
    parts = torch.empty(
        sizes.splits,
        count * heads,
        rows.latent,
        dtype=q.dtype if alone else torch.float32,
        device=device,
    )
    lses = torch.empty(sizes.splits, count * heads, dtype=torch.float32, device=device)
    if count:
        sparse_mla_kernel[(count * sizes.splits, -(-heads // sizes.heads))](
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
            sizes.splits,
            sizes.chunk,
            rows.page_stride,
            rows.row_stride,
            q.stride(0),
            q.stride(1),
            0 if ragged else slots.stride(0),
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
            CODES=codes,
            RAGGED=ragged,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )
    if alone:
        return parts.view(count, heads, rows.latent), lses.view(count, heads)
    out, lse = merge(parts, lses, q.dtype)
    return out.view(count, heads, rows.latent), lse.view(count, heads)
