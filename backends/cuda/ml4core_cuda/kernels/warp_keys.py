"""Rows of ``fp8_ds_mla`` on their way to the matrix units: the warps of a Gluon kernel that bring
tiles of 64 keys to shared memory, decoded, while other warps attend to those before.

Hopper's alone. Latents come out 2**60 too small, which leaves one product a pair to decode: who
attends makes good for it. Those of a word lie in the order 0, 2, 1, 3, as they come out of the
bytes with the least work; queries are brought to the same order, and sums back from it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ml4core_triton.kernels import latents
from ml4core_triton.kernels.fp8 import HALF_BIAS as _BIAS

HALF_BIAS = gl.constexpr(_BIAS.value)
_row_offsets = gluon.jit(latents.row_offsets.fn)

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Its name from triton 3.7 on, and before."""

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""What the matrix units read: bf16, rows of 128 bytes."""
_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""The same bytes as words."""


@gluon.constexpr_function
def _part(warps):
    """How many of a tile's keys these warps decode at a time, two a thread."""
    return 8 * warps


@gluon.constexpr_function
def _codes(warps):
    """Words of 4 latents of a group, or of 2 rope values [keys, 32]: a thread has 4 in a row of two
    keys, so that 8 lanes write 128 bytes to different banks, 4 pieces of a key and 4 of the next.
    """
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0]],
        [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]],
        [[8, 0], [16, 0], [32, 0]][: 2 if warps == 4 else 3],
        [],
        [8 * warps, 32],
    )


@gluon.constexpr_function
def _scale_layout(warps):
    """All four scales of the same keys."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0]],
        [[0, 0], [0, 0], [1, 0], [0, 0], [2, 0]],
        [[8, 0], [16, 0], [32, 0]][: 2 if warps == 4 else 3],
        [],
        [8 * warps, 4],
    )


def _word(code: int, scale: int, even: int, odd: int) -> str:
    """Assembly that decodes the four E4M3 bytes of a register: the even ones and the odd ones, as
    two bf16 each, exponent and fraction a bf16's and 2**120 too small, times the scale. ``s``
    gathers a bit of whatever is NaN.
    """
    return f"""
        shr.u32 t, ${code}, 4;
        and.b32 t, t, 0x07f007f0;
        lop3.b32 o, ${code}, 0x80008000, t, 0xEA;
        mul.rn.bf16x2 ${odd}, o, ${scale};
        shl.b32 o, ${code}, 8;
        shl.b32 v, ${code}, 4;
        and.b32 v, v, 0x07f007f0;
        lop3.b32 o, o, 0x80008000, v, 0xEA;
        mul.rn.bf16x2 ${even}, o, ${scale};
        add.u32 t, t, 0x00100010;
        add.u32 v, v, 0x00100010;
        lop3.b32 s, s, t, v, 0xFE;"""


_DECODE = gl.constexpr(
    "{ .reg .b32 t, v, o, s; .reg .pred p; mov.b32 s, 0;"
    + "".join(_word(8 + i, 12 + i, i, 4 + i) for i in range(4))
    + "and.b32 s, s, 0x08000800; setp.ne.u32 p, s, 0; @p mov.b32 $0, 0x7fc07fc0; }"
)
_DECODE_REGISTERS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))


@gluon.jit
def _slots_of(slots, index, last):
    slot = gl.load(slots + index, mask=index < last, other=-1)
    return slot.to(gl.uint32, bitcast=True)


@gluon.jit
def _places(
    rows, slot, all_slots, page_stride, row_stride, BLOCK_SIZE: gl.constexpr, DENSE: gl.constexpr
):  # fmt: skip
    """Addresses of slots' rows, and which of them are keys."""
    valid = slot < all_slots
    slot = gl.where(valid, slot, 0)
    if DENSE:
        offset = slot.to(gl.int64) * row_stride
    else:
        offset = _row_offsets(slot, BLOCK_SIZE, page_stride, row_stride)
    return rows + offset, valid


@gluon.jit
def _words(place, valid, AT: gl.constexpr, WARPS: gl.constexpr):
    """32 words of each row, from byte AT on; 0 where not ``valid``."""
    word = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, _codes(WARPS))), 0)
    where = gl.expand_dims((place + AT).to(gl.pointer_type(gl.int32)), 1) + word
    return gl.load(where, mask=gl.expand_dims(valid, 1) & (word < 32), other=0)


@gluon.jit
def _scales(place, valid, WARPS: gl.constexpr):
    """The four scales of each row."""
    own: gl.constexpr = gl.SliceLayout(1, _scale_layout(WARPS))
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, _scale_layout(WARPS))), 0)
    place = gl.convert_layout(place, own, assert_trivial=True)
    valid = gl.convert_layout(valid, own, assert_trivial=True)
    where = gl.expand_dims((place + 512).to(gl.pointer_type(gl.float32)), 1) + group
    return gl.load(where, mask=gl.expand_dims(valid, 1) & (group < 4), other=0.0)


@gluon.jit
def _factors(scale):
    """What the codes of each group are multiplied by, as two bf16 of a word each."""
    factor = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [scale * HALF_BIAS],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    even, odd = gl.split(gl.reshape(factor, (factor.shape[0], 2, 2)))
    factor0, factor2 = gl.split(even)
    factor1, factor3 = gl.split(odd)
    return factor0, factor1, factor2, factor3


@gluon.jit
def _decoded(codes, factor, keys, GROUP: gl.constexpr):
    """A group into shared memory."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, codes.type.layout), assert_trivial=True)
    codes, factor = gl.broadcast(codes, gl.expand_dims(factor, 1))
    even, odd = gl.inline_asm_elementwise(
        _DECODE, _DECODE_REGISTERS, [codes, factor],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=4,
    )  # fmt: skip
    keys.slice(GROUP * 64, 64, 1).store(gl.reshape(gl.join(even, odd), (codes.shape[0], 64)))


@gluon.jit
def written():
    """What was stored may be read by the matrix units."""
    fence_async_shared()
    barrier()


@gluon.jit
def paired(tile):
    """[heads, 512] with the second and the third of every four columns exchanged."""
    pairs = gl.permute(gl.reshape(tile, (tile.shape[0], 128, 2, 2)), (0, 1, 3, 2))
    return gl.reshape(pairs, (tile.shape[0], 512))


@gluon.jit
def bring_keys(
    rows, slots, first, last, all_slots, page_stride, row_stride, held, ropes, known, full, empty,
    BLOCK_SIZE: gl.constexpr, DENSE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Tiles of the keys ``first`` .. ``last``, each into the half of ``held`` bf16 [2, 64, 512],
    ``ropes`` [2, 64, 64] and ``known`` int32 [2, 64] that is ``empty``, which is then ``full``.
    What comes next is on its way to registers meanwhile.
    """
    PART: gl.constexpr = _part(WARPS)
    index = gl.arange(0, PART, layout=gl.SliceLayout(1, _codes(WARPS)))
    slot = _slots_of(slots, first + index, last)
    place, valid = _places(rows, slot, all_slots, page_stride, row_stride, BLOCK_SIZE, DENSE)
    scale = _scales(place, valid, WARPS)
    codes0 = _words(place, valid, 0, WARPS)
    codes1 = _words(place, valid, 128, WARPS)
    codes2 = _words(place, valid, 256, WARPS)
    codes3 = _words(place, valid, 384, WARPS)
    rope = _words(place, valid, 528, WARPS)
    for turn in range(gl.cdiv(last - first, 64)):
        start, half = first + turn * 64, turn % 2
        mbarrier.wait(empty.index(half), ((turn // 2) & 1) ^ 1)
        for part in gl.static_range(64 // PART):
            slot = _slots_of(slots, start + (part + 1) * PART + index, last)
            keys = held.index(half)._reinterpret(gl.int32, [64, 256], _WORDS)
            keys = keys.slice(part * PART, PART, 0)
            tails = ropes.index(half)._reinterpret(gl.int32, [64, 32], _WORDS)
            tails.slice(part * PART, PART, 0).store(rope)
            known.index(half).slice(part * PART, PART, 0).store(valid.to(gl.int32))
            factor0, factor1, factor2, factor3 = _factors(scale)
            place, valid = _places(
                rows, slot, all_slots, page_stride, row_stride, BLOCK_SIZE, DENSE
            )
            scale = _scales(place, valid, WARPS)
            rope = _words(place, valid, 528, WARPS)
            # A group is asked for when the stores of the one behind it have begun: those of its own
            # read the same registers.
            _decoded(codes0, factor0, keys, 0)
            _decoded(codes1, factor1, keys, 1)
            codes0 = _words(place, valid, 0, WARPS)
            _decoded(codes2, factor2, keys, 2)
            codes1 = _words(place, valid, 128, WARPS)
            _decoded(codes3, factor3, keys, 3)
            codes2 = _words(place, valid, 256, WARPS)
            codes3 = _words(place, valid, 384, WARPS)
        written()
        mbarrier.arrive(full.index(half), count=1)
