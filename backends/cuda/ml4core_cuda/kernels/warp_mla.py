"""``sparse_mla`` over rows of ``fp8_ds_mla``, in Gluon: some warps decode keys while others attend.

Triton decodes a tile, multiplies, and waits for it, one after the other. Here the warps of
``bring_keys`` fill one half of shared memory, and those of this module take the other: tiles of 64
heads here, up to 32 in ``warp_mla_few``. With 64, queries, two tiles and weights fill it.
Hopper's alone: its matrix units take operands from shared memory and leave sums in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ml4core.api import KVCache
from ml4core_cuda.kernels.warp_keys import HALF_BIAS, SHARED, barrier, bring_keys, paired, written
from ml4core_cuda.kernels.warp_mla_few import MOST_HEADS, warp_mla_few_kernel
from ml4core_triton.kernels import chaining
from ml4core_triton.kernels.attend import LOG2E
from ml4core_triton.kernels.chaining import dependent
from ml4core_triton.kernels.latents import LatentRows

MANY = {"REGISTERS": 112, "num_warps": 8}
FEW = {"REGISTERS": 136, "num_warps": 4}
"""Warps that attend, and registers of each thread that decodes: the others have what is left."""

_LN2 = gl.constexpr(0.6931471805599453)
_wait_for_previous = gluon.jit(chaining.wait_for_previous.fn)
_let_next_begin = gluon.jit(chaining.let_next_begin.fn)

_ROPE_Q = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_Q = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_OUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_STAGED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
# The largest scores [64, 2] of each row, one of either group of four warps, where its scores are.
_BOTH = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)
_TOP = gl.constexpr(gl.SliceLayout(1, _BOTH.value))
# What each thread has of a row's sum [64, 2, 4].
_PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0], [0, 1, 0]],
        block_bases=[],
        shape=[64, 2, 4],
    )
)


@gluon.jit
def _row_top(found, tops):
    """The largest score of each row, of both groups of warps."""
    own = gl.max(gl.reshape(found, (64, 2, 32)), 2)
    tops.store(own)
    barrier()
    return gl.max(tops.load(_BOTH), 1)


@gluon.jit
def _own_sum(part):
    """What a thread has of each row's sum, [64, 2, 4]; no warp waits for another."""
    return gl.sum(gl.sum(gl.reshape(part, (64, 2, 4, 4, 2)), 4), 2)


@gluon.jit
def _attend_tiles(
    q, out, lse, factor, first, last, head0, q_head_stride, q_latent, q_rope, held, ropes, weights,
    known, tops, full, empty, N: gl.constexpr,
):  # fmt: skip
    """The warps that attend: a tile's scores, weights and weighted sum, one after the other."""
    head = gl.expand_dims(head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, _Q)), 1)
    column = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, _Q)), 0)
    latent = gl.load(q + head * q_head_stride + column, mask=(head < N) & (column < 512), other=0.0)
    q_latent.store(paired(latent))
    head = gl.expand_dims(head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, _ROPE_Q)), 1)
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, _ROPE_Q)), 0)
    tail = gl.load(
        q + head * q_head_stride + column + 512, mask=(head < N) & (column < 64), other=0.0
    )
    # As much too small as decoded latents are.
    q_rope.store((tail.to(gl.float32) * (1.0 / HALF_BIAS)).to(gl.bfloat16))
    written()
    acc = gl.zeros((64, 512), gl.float32, _SUMS)
    top = gl.full((64,), float("-inf"), gl.float32, _TOP)
    total = gl.zeros((64, 2, 4), gl.float32, _PARTS)
    factor *= HALF_BIAS
    for turn in range(gl.cdiv(last - first, 64)):
        half = turn % 2
        mbarrier.wait(full.index(half), (turn // 2) & 1)
        none = gl.zeros((64, 64), gl.float32, _SCORES)
        keys = held.index(half)
        found = warpgroup_mma(q_latent, keys.permute((1, 0)), none, use_acc=False, is_async=True)
        found = warpgroup_mma(q_rope, ropes.index(half).permute((1, 0)), found, is_async=True)
        seen = known.index(half).load(gl.SliceLayout(0, _SCORES))
        found = warpgroup_mma_wait(0, deps=[found])
        found = gl.where(gl.expand_dims(seen, 0) != 0, found * factor, float("-inf"))
        new_top = gl.maximum(top, _row_top(found, tops))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        own = gl.convert_layout(base, gl.SliceLayout(1, _SCORES))
        part = gl.exp2(found - gl.expand_dims(own, 1))
        weights.store(part.to(gl.bfloat16))
        fade = gl.exp2(top - base)
        top = new_top
        own = gl.convert_layout(fade, gl.SliceLayout(1, gl.SliceLayout(2, _PARTS)))
        total = total * gl.expand_dims(gl.expand_dims(own, 1), 2)
        total += gl.convert_layout(_own_sum(part), _PARTS)
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, _SUMS)), 1)
        written()
        acc = warpgroup_mma(weights, keys, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(half), count=1)
    sums = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), _TOP)
    some = sums != 0.0  # NaN too
    sums = gl.where(some, sums, 1.0)
    own_lse = gl.where(some, (top + gl.log2(sums)) * _LN2, float("-inf"))
    head = head0 + gl.arange(0, 64, layout=_TOP)
    gl.store(lse + head, own_lse, mask=head < N)
    share = gl.convert_layout(HALF_BIAS / sums, gl.SliceLayout(1, _SUMS))
    staged = held._reinterpret(gl.float32, [64, 512], _STAGED)
    staged.store(acc * gl.expand_dims(share, 1))
    barrier()
    values = paired(staged.load(_OUT)).to(out.dtype.element_ty)
    head = gl.expand_dims(head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, _OUT)), 1)
    column = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, _OUT)), 0)
    values = gl.convert_layout(values, _OUT, assert_trivial=True)
    gl.store(out + head * 512 + column, values, mask=(head < N) & (column < 512))


@gluon.jit
def warp_mla_kernel(
    q, rows, slots, lens, out, lse, factor, keys, all_slots, splits, chunk, page_stride, row_stride,
    q_row_stride, q_head_stride, slots_stride, out_split_stride, lse_split_stride,
    N: gl.constexpr, BLOCK_SIZE: gl.constexpr, DENSE: gl.constexpr, JOINED: gl.constexpr,
    DEPENDENT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (rows times splits, tiles of heads)."""
    _let_next_begin(DEPENDENT or JOINED)
    _wait_for_previous(DEPENDENT)
    program = gl.program_id(0)
    row = (program // splits).to(gl.int64)
    split = program % splits
    first = split * chunk
    last = gl.minimum(first + chunk, gl.minimum(gl.load(lens + row), keys))
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [64, 512], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    held = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    known = gl.allocate_shared_memory(gl.int32, [2, 64], _PLAIN)
    tops = gl.allocate_shared_memory(gl.float32, [64, 2], _PLAIN2)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(full.index(half), count=1)
        mbarrier.init(empty.index(half), count=1)
    gl.warp_specialize(
        [
            (_attend_tiles, (
                q + row * q_row_stride, out + split * out_split_stride + row * N * 512,
                lse + split * lse_split_stride + row * N, factor, first, last,
                gl.program_id(1) * 64, q_head_stride, q_latent, q_rope, held, ropes, weights, known,
                tops, full, empty, N,
            )),
            (bring_keys, (
                rows, slots + row * slots_stride, first, last, all_slots, page_stride, row_stride,
                held, ropes, known, full, empty, BLOCK_SIZE, DENSE, 4,
            )),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


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
    ahead: bool,
) -> tuple[Tensor, Tensor]:
    """Parts as ``tile_mla.launch`` gives them, of bf16 queries over rows of ``fp8_ds_mla``.

    The keys of each part are whole tiles; ``heads`` of a tile are 64, or 8, 16 or 32.
    """
    count, all_heads, _ = q.shape
    splits, chunk = cut
    dtype = q.dtype if splits == 1 else torch.float32
    parts = torch.empty(splits, count * all_heads, 512, dtype=dtype, device=q.device)
    lses = torch.empty(splits, count * all_heads, dtype=torch.float32, device=q.device)
    if count:
        few = heads <= MOST_HEADS
        kernel = warp_mla_few_kernel if few else warp_mla_kernel
        sizes: dict[str, int] = {"BH": heads, **FEW} if few else MANY
        kernel[(count * splits, -(-all_heads // heads))](
            q, rows.rows, slots, lens.contiguous(), parts, lses, scale * LOG2E, slots.shape[1],
            cache.blocks * cache.block_size, splits, chunk, rows.page_stride, rows.row_stride,
            q.stride(0), q.stride(1), slots.stride(0), parts.stride(0), lses.stride(0),
            N=all_heads, BLOCK_SIZE=cache.block_size,
            DENSE=rows.page_stride == cache.block_size * rows.row_stride,
            JOINED=splits > 1, DEPENDENT=ahead, **sizes, **dependent(ahead),
        )  # fmt: skip
    return parts, lses
