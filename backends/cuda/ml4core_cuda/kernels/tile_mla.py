"""``sparse_mla`` over rows of 512 latents and 64 rope values, in the form that fills the matrix
units.

A program takes one row, a tile of its heads and a part of its keys, as in ``attend_slots``. What a
later tile of keys needs is asked for while this one is worked on: rows lie anywhere, so a program
would wait for the memory at each tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.kernels.tile_step import (
    LATENT,
    ROPE,
    fetch_ahead,
    key_major_step,
    key_tile,
    rope_rows,
    tile_step,
)
from ml4core_triton.kernels.attend import LOG2E
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.latents import DS_MLA, WIDE, LatentRows, row_offsets
from ml4core_triton.kernels.numeric import narrow

_LN2 = tl.constexpr(0.6931471805599453)

KEY_MAJOR_HEADS = 32
"""Heads of a tile up to which keys are the left operand."""
KEY_ROWS = 128
"""Keys of such a tile, 16 for each of eight warps. Of 64, by four or eight warps, Triton 3.6 makes
code that is wrong on an H200, up to accesses out of memory."""
_KEY_ROWS = tl.constexpr(KEY_ROWS)


@triton.jit
def _place(slots, index, last, all_slots, page_stride, row_stride, BLOCK_SIZE: tl.constexpr):
    """Offsets of the rows of slots ``index``, and which of them are keys."""
    slot = tl.load(slots + index, mask=index < last, other=-1)
    # Unsigned, where a negative one lies behind all: every register counts here.
    place = slot.to(tl.uint32, bitcast=True)
    valid = place < all_slots
    offsets = row_offsets(tl.where(valid, place, 0), BLOCK_SIZE, page_stride, row_stride)
    return offsets, valid


@triton.jit
def tile_mla_kernel(
    q,
    rows,
    slots,
    lens,
    out,
    lse,
    factor,
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
    BH: tl.constexpr,
    BK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTEGERS: tl.constexpr,
    FETCH: tl.constexpr,
    JOINED: tl.constexpr,
    KEY_MAJOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """``KEY_MAJOR``: keys are the left operand. ``JOINED``: the launch that joins the parts may
    come up while this one runs.
    """
    tl.static_assert(not KEY_MAJOR or BK == _KEY_ROWS, "see KEY_ROWS")
    let_next_begin(DEPENDENT or JOINED)
    wait_for_previous(DEPENDENT)
    # Splits of one row stand together, so that its queries are read once into L2.
    program = tl.program_id(0)
    row = (program // splits).to(tl.int64)
    split = program % splits
    slots += row * slots_stride
    first = split * chunk
    last = tl.minimum(first + chunk, tl.minimum(tl.load(lens + row), keys))
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    column = tl.arange(0, L)
    tail = tl.arange(0, R) + L
    q_row = q + row * q_row_stride
    known_head = head < N
    if KEY_MAJOR:
        q_row += head[None, :] * q_head_stride
        q_latent = tl.load(q_row + column[:, None], known_head[None, :], other=0.0)
        q_rope = tl.load(q_row + tail[:, None], known_head[None, :], other=0.0)
        summed = tl.zeros((L, BH), tl.float32)
    else:
        q_row += head[:, None] * q_head_stride
        q_latent = tl.load(q_row + column[None, :], known_head[:, None], other=0.0)
        q_rope = tl.load(q_row + tail[None, :], known_head[:, None], other=0.0)
        summed = tl.zeros((BH, L), tl.float32)
    top = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    for start in range(first, last, BK):
        index = start + tl.arange(0, BK)
        offsets, valid = _place(slots, index, last, all_slots, page_stride, row_stride, BLOCK_SIZE)
        tile = key_tile(rows, offsets, valid, KIND, BK, INTEGERS)
        # The step for many heads takes the product with rope parts away from that with latents.
        rope = rope_rows(rows, offsets, valid, KIND, not KEY_MAJOR)
        if FETCH:
            ahead, _ = _place(
                slots, index + BK, last, all_slots, page_stride, row_stride, BLOCK_SIZE
            )
            fetch_ahead(rows, ahead, KIND)
        if KEY_MAJOR:
            top, total, summed = key_major_step(
                q_latent, q_rope, tile, rope, valid[:, None], factor, top, total, summed, BH, BK
            )
        else:
            top, total, summed = tile_step(
                q_latent, q_rope, tile, rope, valid[None, :], factor, top, total, summed, BH, BK
            )
    out += split * out_split_stride + row * N * L
    lse += split * lse_split_stride + row * N
    some = total != 0.0  # NaN too
    sums = tl.where(some, total, 1.0)
    own_lse = tl.where(some, (top + tl.log2(sums)) * _LN2, float("-inf"))
    if KEY_MAJOR:
        values = narrow(summed / sums[None, :], out.dtype.element_ty)
        tl.store(out + head[None, :] * L + column[:, None], values, mask=known_head[None, :])
    else:
        values = narrow(summed / sums[:, None], out.dtype.element_ty)
        tl.store(out + head[:, None] * L + column[None, :], values, mask=known_head[:, None])
    tl.store(lse + head, own_lse, mask=known_head)


def serves(q: Tensor, rows: LatentRows) -> bool:
    """Whether queries [T, N, W] in bf16 and the rows are what this kernel is for."""
    known = rows.kind == DS_MLA.value or (
        rows.kind == WIDE.value and rows.rows.dtype == torch.bfloat16
    )
    shape = (rows.latent, rows.rope) == (LATENT, ROPE) and q.shape[-1] == LATENT + ROPE
    return known and shape and q.dtype == torch.bfloat16


def launch(
    q: Tensor,
    cache: KVCache,
    rows: LatentRows,
    slots: Tensor,
    lens: Tensor,
    scale: float,
    cut: tuple[int, int],
    *,
    heads: int,
    keys: int,
    warps: int,
    integers: bool,
    fetch: bool,
    ahead: bool,
) -> tuple[Tensor, Tensor]:
    """Parts of each row's keys, to be joined: [parts, T N, 512], in q's dtype if there is one part
    and fp32 else, and [parts, T N].

    ``cut``: how many parts there are and the keys of each. ``heads`` and ``keys`` of a tile.
    """
    count, all_heads, _ = q.shape
    splits, chunk = cut
    dtype = q.dtype if splits == 1 else torch.float32
    parts = torch.empty(splits, count * all_heads, LATENT, dtype=dtype, device=q.device)
    lses = torch.empty(splits, count * all_heads, dtype=torch.float32, device=q.device)
    if count:
        tile_mla_kernel[(count * splits, -(-all_heads // heads))](
            q,
            rows.rows,
            slots,
            lens.contiguous(),
            parts,
            lses,
            scale * LOG2E,
            slots.shape[1],
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
            N=all_heads,
            KIND=rows.kind,
            L=LATENT,
            R=ROPE,
            BH=heads,
            BK=keys,
            BLOCK_SIZE=cache.block_size,
            INTEGERS=integers,
            FETCH=fetch,
            JOINED=splits > 1,
            KEY_MAJOR=heads <= KEY_MAJOR_HEADS,
            DEPENDENT=ahead,
            num_warps=warps,
            num_stages=1,
            **dependent(ahead),
        )
    return parts, lses
