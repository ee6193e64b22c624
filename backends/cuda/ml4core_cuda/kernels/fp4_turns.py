"""Sums of up to 8 rows times a weight in FP4, in Gluon, for any of NVIDIA's GPUs from Hopper on.

The weight comes to shared memory turns ahead of what decodes it, and goes from there to registers
as the matrix units take it: thread 4 g + t of a warp has columns 32 t .. 32 t + 31 of rows g,
g + 8, .. of a turn [8 R, 128]. It reads what it asked for itself. The warps of a program share its
rows, and take columns in turn.

Of a word's eight codes the first and the fifth are decoded together, and so on: of 16 columns on
the units' inner axis a thread has 0, 4, 1, 5 of its eight, then 2, 6, 3, 7; the activation is put
in the same order. About 3.1 instructions a value, of which 2.1 decode it.
"""

# Tuples grow by turns, as the kernel is compiled; its language has no way to unpack one.
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ml4core_cuda.kernels.fp4_units import added, factors, flat, scale_words, wide
from ml4core_triton.kernels.weights import K_TILE, NVFP4

_TILE = gl.constexpr(K_TILE)
_NVFP4 = gl.constexpr(NVFP4)

PAIRS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def steps_of(columns: int, warps: int, chunks: int) -> int:
    """Steps that a matrix of so many columns takes."""
    return -(-columns // (K_TILE * warps * chunks))


@gluon.jit
def row_of(group, one, first, limit, GATED: gl.constexpr):
    """The weight's row that stands at 8 group + one of a program's; beyond the last is the last.
    Of a gated product eight of w1 and the same of w3 follow each other.
    """
    if GATED:
        row = gl.minimum(first + group // 2 * 8 + one, limit - 1) + group % 2 * limit
    else:
        row = gl.minimum(first + group * 8 + one, limit - 1)
    return row


@gluon.jit
def _ask_turn(
    matrix, codes, scales, turn, place, first, limit,
    K: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr, FORMAT: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Sends a turn of the weight on its way to a ``place`` in shared memory."""
    WORDS: gl.constexpr = scale_words(FORMAT)
    CHUNKS: gl.constexpr = K // _TILE
    thread = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, wide(WARPS, 4)))
    chunk = turn * WARPS + thread // 32
    chunk = gl.where(chunk < CHUNKS, chunk, 0)  # beyond the last is the first one, times zeros
    four = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, wide(WARPS, 4))), 0)
    for group in gl.static_range(R):
        row = row_of(group, thread % 32 // 4, first, limit, GATED)
        at = row * (K // 8) + chunk * (_TILE // 8) + thread % 4 * 4
        async_copy.async_copy_global_to_shared(
            codes[group].index(place), matrix[0] + gl.expand_dims(at, 1) + four
        )
    index = gl.arange(0, R * WARPS * 8 * WORDS, layout=flat(WARPS))
    row = row_of(index // (WARPS * 8 * WORDS), index // WORDS % 8, first, limit, GATED)
    chunk = turn * WARPS + index // (8 * WORDS) % WARPS
    chunk = gl.where(chunk < CHUNKS, chunk, 0)
    at = row * (CHUNKS * WORDS) + chunk * WORDS + index % WORDS
    async_copy.async_copy_global_to_shared(scales.index(place), matrix[1] + at)


@gluon.jit
def _ask(
    matrix, held, step, place, first, limit,
    K: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr, FORMAT: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The same of the turns of a step."""
    for one in gl.static_range(C):
        _ask_turn(
            matrix, held[0][one], held[1][one], step * C + one, place, first, limit,
            K, R, WARPS, FORMAT, GATED,
        )  # fmt: skip


@gluon.jit
def _placed(low, high):
    """Of words of columns (0, 1) and (4, 5) those of (0, 4) and (1, 5)."""
    first, second = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;", "=&r,=r,r,r", [low, high],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return first, second


@gluon.jit
def _activations(x, turn, K: gl.constexpr, WARPS: gl.constexpr, PLACED: gl.constexpr):
    """A turn's, as words of two, four for each eight columns [32 WARPS, 4]; ``x`` are the words of
    each thread's row.
    """
    own: gl.constexpr = gl.SliceLayout(1, wide(WARPS, 16))
    thread = gl.arange(0, 32 * WARPS, layout=own)
    chunk = turn * WARPS + thread // 32
    at = x + chunk * (_TILE // 2) + thread % 4 * 16
    at = gl.expand_dims(at, 1)
    word = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, wide(WARPS, 16))), 0)
    there = gl.expand_dims(chunk < K // _TILE, 1) & (word < 16)
    found = gl.load(at + word, mask=there, other=0)
    even, odd = gl.split(gl.reshape(found, (32 * WARPS, 4, 2, 2)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    if not PLACED:
        first, second = _placed(x0, x2)
        x2, x3 = _placed(x1, x3)
        x0, x1 = first, second
    return _own(x0, WARPS), _own(x1, WARPS), _own(x2, WARPS), _own(x3, WARPS)


@gluon.jit
def _own(x, WARPS: gl.constexpr):
    return gl.convert_layout(x, wide(WARPS, 4), assert_trivial=True)


@gluon.jit
def place_of(column):
    """Where a column stands in an activation that is written to be read as ``PLACED``."""
    return column // 8 * 8 + column % 4 * 2 + column % 8 // 4


@gluon.jit
def _turned(
    x, codes, scales, turn, place, acc, K: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr,
    FORMAT: gl.constexpr, PLACED: gl.constexpr, TWICE: gl.constexpr,
):  # fmt: skip
    """``acc`` and the products of the turn at a ``place``: a tuple of fp32 [32 WARPS, 4], for each
    16 rows. A thread has rows g, g, g + 8, g + 8 and activations 2 t, 2 t + 1, 2 t, 2 t + 1.
    """
    x0, x1, x2, x3 = _activations(x, turn, K, WARPS, PLACED)
    sizes = scales._reinterpret(
        gl.int16 if FORMAT == _NVFP4 else gl.int8, [scales.shape[0] * R, 32 * WARPS], LINE
    )
    found = ()
    for pair in gl.static_range(R // 2):
        at = place * R + pair * 2
        factor0 = factors(sizes.index(at).load(flat(WARPS)), FORMAT, TWICE, WARPS)
        factor1 = factors(sizes.index(at + 1).load(flat(WARPS)), FORMAT, TWICE, WARPS)
        words0 = codes[pair * 2].index(place).load(wide(WARPS, 4))
        words1 = codes[pair * 2 + 1].index(place).load(wide(WARPS, 4))
        one = added(words0, words1, factor0, factor1, x0, x1, x2, x3, acc[pair], TWICE)
        found = found + (one,)
    return found


@gluon.jit
def _room(
    R: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Shared memory for ``STAGES`` steps of ``C`` turns each: codes and scales."""
    # Copies to what is one allocation would be ordered by the compiler, with a barrier between.
    codes, scales = (), ()
    for _ in gl.static_range(C):
        rows = ()
        for _ in gl.static_range(R):
            rows = rows + (gl.allocate_shared_memory(gl.int32, [STAGES, 32 * WARPS, 4], PAIRS),)
        codes = codes + (rows,)
        scales = scales + (
            gl.allocate_shared_memory(
                gl.int32, [STAGES, R * WARPS * 8 * scale_words(FORMAT)], LINE
            ),
        )
    return codes, scales


@gluon.jit
def _sums(
    x, matrix, held, first, limit,
    K: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    FORMAT: gl.constexpr, GATED: gl.constexpr, PLACED: gl.constexpr, TWICE: gl.constexpr,
):  # fmt: skip
    """A tuple of fp32 [32 WARPS, 4], for each 16 rows."""
    STEPS: gl.constexpr = steps_of(K, WARPS, C)
    acc = ()
    for _ in gl.static_range(R // 2):
        acc = acc + (gl.zeros((32 * WARPS, 4), gl.float32, wide(WARPS, 4)),)
    for step in gl.static_range(STAGES - 1):
        if step < STEPS:
            _ask(matrix, held, step, step, first, limit, K, R, WARPS, C, FORMAT, GATED)
        async_copy.commit_group()
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        after = step + STAGES - 1
        if after < STEPS:
            _ask(matrix, held, after, after % STAGES, first, limit, K, R, WARPS, C, FORMAT, GATED)
        async_copy.commit_group()
        for one in gl.static_range(C):
            acc = _turned(
                x, held[0][one], held[1][one], step * C + one, step % STAGES, acc,
                K, R, WARPS, FORMAT, PLACED, TWICE,
            )  # fmt: skip
    async_copy.wait_group(0)
    return acc


@gluon.jit
def row_sums(
    x, codes, scales, first, limit,
    K: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    FORMAT: gl.constexpr, GATED: gl.constexpr, PLACED: gl.constexpr,
):  # fmt: skip
    """The products of 8 R rows of a weight [.., K] with 8 rows of an activation, a tuple of fp32
    [8, 4, 2, 2] for each 16 rows: row g + 8 i by activation 2 t + j at [g, t, i, j].

    ``x`` are pointers to the words of each thread's activation row, in ``SliceLayout(1, wide(WARPS,
    16))``; ``codes`` and ``scales`` to words. ``row_of`` says which rows. K is a multiple of 128,
    and the matrix of less than 2 GiB. ``PLACED``: columns of x stand where ``place_of`` has them.
    ``C`` turns are asked for at once, and shared memory holds ``STAGES`` times that. Row scales of
    ``nvfp4`` are left to the caller.
    """
    matrix, held = (codes, scales), _room(R, WARPS, C, STAGES, FORMAT)
    acc = _sums(x, matrix, held, first, limit, K, R, WARPS, C, STAGES, FORMAT, GATED, PLACED, False)
    if FORMAT == _NVFP4:
        factor = 128.0
    else:
        factor = 16.0
        broken = gl.zeros((32 * WARPS, 4), gl.int32, wide(WARPS, 4))
        for pair in gl.static_range(R // 2):
            broken = broken | (gl.abs(acc[pair]) < float("inf")).to(gl.int32) ^ 1
        if gl.max(gl.max(broken, 1), 0) > 0:
            acc = _sums(
                x, matrix, held, first, limit, K, R, WARPS, C, STAGES, FORMAT, GATED, PLACED, True
            )
            factor = 1.0
    found = ()
    for pair in gl.static_range(R // 2):
        one = acc[pair] * factor
        if WARPS > 1:
            one = gl.sum(gl.reshape(one, (WARPS, 32, 4)), 0)
        found = found + (gl.reshape(one, (8, 4, 2, 2)),)
    return found
