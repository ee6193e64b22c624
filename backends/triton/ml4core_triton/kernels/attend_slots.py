"""Attention of absorbed queries over chosen slots of a latent cache: what ``sparse_mla`` launches.

A program takes one row, a tile of its heads and a part of its keys; where there are too few of
these for the device, keys are split further and the parts joined by ``merge_lse``. Heads of a tile
that aren't there are masked in registers: no query is padded or copied to FP8 in memory, and
nothing is planned ahead, as a launch depends on shapes alone.

``precision`` says in what queries meet the keys of an FP8 cache. ``bf16`` is exact but for the
rounding of weights: codes are decoded on the way. ``fp8`` quantises a row's head in registers, its
scale its largest magnitude over 448 (224 in e4m3fnuz), and weights of keys too, so that codes go
from the cache to the matrix units as they are; not for ``fp8_ds_mla``, whose values have scales of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

from ml4core.api import KVCache
from ml4core_triton.kernels.attend import LOG2E, attend_keys, finished, product_dtype
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.fp8 import fp8_rounded
from ml4core_triton.kernels.latents import (
    E4M3FNUZ,
    LatentRows,
    latent_rows,
    row_offsets,
    row_scale,
)
from ml4core_triton.kernels.merge_lse import merge
from ml4core_triton.kernels.numeric import finite_size, narrow, next_power, triton_dtype, widen

Precision = Literal["bf16", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8")


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


Plan = Callable[[LatentRows, bool, bool], Tiling]
"""Sizes for these rows; whether operands are fp32; and whether codes meet as they are."""


@triton.jit
def _within(slot, all_slots):
    """Slots int32 as they are added up with, and whether they lie in the cache. Every register
    counts here: NVIDIA's compiler saves some where a negative slot, unsigned, lies behind all, and
    AMD's where it is signed.
    """
    if is_hip():
        place = slot
        valid = (slot >= 0) & (slot < all_slots)
    else:
        place = slot.to(tl.uint32, bitcast=True)
        valid = place < all_slots
    return place, valid


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
    DEPENDENT: tl.constexpr,
):
    """Row t's slots are the first ``lens[t]`` of row t of ``slots``; where ``RAGGED``, those from
    ``lens[t]`` to ``lens[t + 1]`` of all.
    """
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    # Splits of one row stand together, so that its queries are read once into L2.
    program = tl.program_id(0)
    row = (program // splits).to(tl.int64)
    split = program % splits
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    column = tl.arange(0, BL)
    known_head = (head < N)[:, None]
    q_row = q + row * q_row_stride + head[:, None] * q_head_stride
    q_latent = tl.load(q_row + column[None, :], known_head & (column < L)[None, :], other=0.0)
    q_rope = q_latent
    if HAS_ROPE:
        tail = tl.arange(0, BR)
        q_rope = tl.load(q_row + L + tail[None, :], known_head & (tail < R)[None, :], other=0.0)
    key_scale = row_scale(cache_scale, KIND)
    factor = softmax_factor * key_scale
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
        factor = factor * q_scale[:, None]
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
        place, valid = _within(slot, all_slots)
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
            DTYPE,
            CODES,
        )
    summed, own_lse = finished(top, total, summed, CODES)
    summed = summed * key_scale
    target = out + split * out_split_stride + (row * N + head[:, None]) * L + column[None, :]
    values = narrow(summed, out.dtype.element_ty)
    tl.store(target, values, mask=known_head & (column < L)[None, :])
    tl.store(lse + split * lse_split_stride + row * N + head, own_lse, mask=head < N)


def attended(
    q: Tensor,
    cache: KVCache,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    keys: int,
    plan: Plan,
    *,
    precision: Precision = "bf16",
    ragged: bool = False,
) -> tuple[Tensor, Tensor]:
    """``q`` [T, N, W] over the first lens [T] of slots int32 [T, k]: out [T, N, L] in q's dtype and
    lse fp32 [T, N], base e; or with ``ragged`` over one stream of slots, ``lens`` being where each
    row's begin, [T + 1]. ``keys`` is what a row has at most, of a stream what most rows have. Slots
    outside of the cache are skipped. A row without keys: 0 and -inf.

    ``ValueError`` for a layout that isn't read, and for an unknown precision.
    """
    count, heads, _ = q.shape
    parts, lses = attended_parts(
        q, cache, slots, lens, scale, keys, plan, precision=precision, ragged=ragged
    )
    out, lse = (parts[0], lses[0]) if len(parts) == 1 else merge(parts, lses, q.dtype)
    return out.view(count, heads, -1), lse.view(count, heads)


def attended_parts(
    q: Tensor,
    cache: KVCache,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    keys: int,
    plan: Plan,
    *,
    precision: Precision = "bf16",
    ragged: bool = False,
    ahead: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same over parts of each row's keys, to be joined: [parts, T N, L], in q's dtype if there
    is one part and fp32 else, and [parts, T N].

    ``ahead``: the launch may begin before the end of the one before it.
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
    if slots.stride(-1) != 1:
        slots = slots.contiguous()
    dtype = product_dtype(q, rows.rows)
    wide = dtype == torch.float32
    codes = precision == "fp8" and rows.scaled and not wide
    sizes = plan(rows, wide, codes)
    splits, chunk = sizes.cut(keys)
    parts = torch.empty(
        splits,
        count * heads,
        rows.latent,
        dtype=q.dtype if splits == 1 else torch.float32,
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
            DEPENDENT=ahead,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
            **dependent(ahead),
        )
    return parts, lses
