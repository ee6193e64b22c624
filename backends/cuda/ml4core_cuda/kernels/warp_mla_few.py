"""``warp_mla`` for up to 32 heads: keys are the left operand of both products, heads their columns.

One group of warps attends, and eight warps decode, which is most of the work here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ml4core_cuda.kernels.warp_keys import HALF_BIAS, SHARED, barrier, bring_keys, paired, written
from ml4core_triton.kernels import chaining

MOST_HEADS = 32
_LN2 = gl.constexpr(0.6931471805599453)
_wait_for_previous = gluon.jit(chaining.wait_for_previous.fn)
_let_next_begin = gluon.jit(chaining.let_next_begin.fn)

_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_STAGED = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_Q = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_ROPE_Q = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_OUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


@gluon.constexpr_function
def _columns(heads):
    """Scores [keys, heads] and sums [512, heads]: warps along the rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, heads, 16])


@gluon.constexpr_function
def _own_heads(heads):
    """Bases of the heads whose scores a thread has."""
    return [1] + [8 * 2**i for i in range(heads.bit_length() - 4)]


@gluon.constexpr_function
def _tops(heads):
    """What each warp found for a head [4, heads], all four where its scores are."""
    return gl.DistributedLinearLayout(
        [[0, base] for base in _own_heads(heads)] + [[1, 0], [2, 0]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [],
        [4, heads],
    )


@gluon.constexpr_function
def _totals(heads):
    """What each thread has of a head's sum [4, 8, heads]."""
    return gl.DistributedLinearLayout(
        [[0, 0, base] for base in _own_heads(heads)],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 8, heads],
    )


@gluon.jit
def _attend_tiles(
    q, out, lse, factor, first, last, head0, q_head_stride, q_latent, q_rope, held, ropes, weights,
    known, tops, full, empty, N: gl.constexpr, BH: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = _columns(BH)
    TOP: gl.constexpr = gl.SliceLayout(0, _tops(BH))
    TOTALS: gl.constexpr = _totals(BH)
    head = gl.expand_dims(head0 + gl.arange(0, BH, layout=gl.SliceLayout(1, _Q)), 1)
    column = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, _Q)), 0)
    latent = gl.load(q + head * q_head_stride + column, mask=(head < N) & (column < 512), other=0.0)
    q_latent.store(paired(latent))
    head = gl.expand_dims(head0 + gl.arange(0, BH, layout=gl.SliceLayout(1, _ROPE_Q)), 1)
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, _ROPE_Q)), 0)
    tail = gl.load(
        q + head * q_head_stride + column + 512, mask=(head < N) & (column < 64), other=0.0
    )
    # As much too small as decoded latents are.
    q_rope.store((tail.to(gl.float32) * (1.0 / HALF_BIAS)).to(gl.bfloat16))
    written()
    acc = gl.zeros((512, BH), gl.float32, COLUMNS)
    top = gl.full((BH,), float("-inf"), gl.float32, TOP)
    total = gl.zeros((4, 8, BH), gl.float32, TOTALS)
    factor *= HALF_BIAS
    for turn in range(gl.cdiv(last - first, 64)):
        half = turn % 2
        mbarrier.wait(full.index(half), (turn // 2) & 1)
        keys = held.index(half)
        none = gl.zeros((64, BH), gl.float32, COLUMNS)
        found = warpgroup_mma(keys, q_latent.permute((1, 0)), none, use_acc=False, is_async=True)
        found = warpgroup_mma(ropes.index(half), q_rope.permute((1, 0)), found, is_async=True)
        seen = known.index(half).load(gl.SliceLayout(1, COLUMNS))
        found = warpgroup_mma_wait(0, deps=[found])
        found = gl.where(gl.expand_dims(seen, 1) != 0, found * factor, float("-inf"))
        tops.store(gl.max(gl.reshape(found, (4, 16, BH)), 1))
        barrier()
        new_top = gl.maximum(top, gl.max(tops.load(_tops(BH)), 0))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        own = gl.convert_layout(base, gl.SliceLayout(0, COLUMNS))
        part = gl.exp2(found - gl.expand_dims(own, 0))
        weights.store(gl.permute(part.to(gl.bfloat16), (1, 0)))
        fade = gl.exp2(top - base)
        top = new_top
        own = gl.convert_layout(fade, gl.SliceLayout(0, gl.SliceLayout(0, TOTALS)))
        total = total * gl.expand_dims(gl.expand_dims(own, 0), 0)
        total += gl.convert_layout(gl.sum(gl.reshape(part, (4, 2, 8, BH)), 1), TOTALS)
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(0, COLUMNS)), 0)
        written()
        acc = warpgroup_mma(keys.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index(half), count=1)
    sums = gl.convert_layout(gl.sum(gl.sum(total, 1), 0), TOP)
    some = sums != 0.0  # NaN too
    sums = gl.where(some, sums, 1.0)
    own_lse = gl.where(some, (top + gl.log2(sums)) * _LN2, float("-inf"))
    head = head0 + gl.arange(0, BH, layout=TOP)
    gl.store(lse + head, own_lse, mask=head < N)
    share = gl.convert_layout(HALF_BIAS / sums, gl.SliceLayout(0, COLUMNS))
    staged = held._reinterpret(gl.float32, [BH, 512], _STAGED)
    staged.store(gl.permute(acc * gl.expand_dims(share, 0), (1, 0)))
    barrier()
    values = paired(staged.load(_OUT)).to(out.dtype.element_ty)
    head = gl.expand_dims(head0 + gl.arange(0, BH, layout=gl.SliceLayout(1, _OUT)), 1)
    column = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, _OUT)), 0)
    values = gl.convert_layout(values, _OUT, assert_trivial=True)
    gl.store(out + head * 512 + column, values, mask=(head < N) & (column < 512))


@gluon.jit
def warp_mla_few_kernel(
    q, rows, slots, lens, out, lse, factor, keys, all_slots, splits, chunk, page_stride, row_stride,
    q_row_stride, q_head_stride, slots_stride, out_split_stride, lse_split_stride,
    N: gl.constexpr, BH: gl.constexpr, BLOCK_SIZE: gl.constexpr, DENSE: gl.constexpr,
    JOINED: gl.constexpr, DEPENDENT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid (rows times splits, tiles of heads)."""
    _let_next_begin(DEPENDENT or JOINED)
    _wait_for_previous(DEPENDENT)
    program = gl.program_id(0)
    row = (program // splits).to(gl.int64)
    split = program % splits
    first = split * chunk
    last = gl.minimum(first + chunk, gl.minimum(gl.load(lens + row), keys))
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [BH, 512], SHARED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [BH, 64], SHARED)
    held = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [BH, 64], SHARED)
    known = gl.allocate_shared_memory(gl.int32, [2, 64], _PLAIN)
    tops = gl.allocate_shared_memory(gl.float32, [4, BH], _PLAIN2)
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
                gl.program_id(1) * BH, q_head_stride, q_latent, q_rope, held, ropes, weights, known,
                tops, full, empty, N, BH,
            )),
            (bring_keys, (
                rows, slots + row * slots_stride, first, last, all_slots, page_stride, row_stride,
                held, ropes, known, full, empty, BLOCK_SIZE, DENSE, 8,
            )),
        ],
        [8],
        [REGISTERS],
    )  # fmt: skip
