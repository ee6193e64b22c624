"""Products of a single row with FP8 matrices that are so small that a launch's beginning and end
count. In Gluon, for any of NVIDIA's GPUs from Hopper on.

A program has 16 rows of the matrix, in turns of 256 columns. Its codes come straight into
registers, 16 bytes a thread, and nothing waits for other warps but the activation, which stands in
shared memory. The first ``AHEAD`` turns are asked for at once; by a launch that comes up ahead of
the end of the one before, before it waits for the activation.
"""

# Tuples grow by turns, as the kernel is compiled; its language has no way to unpack one.
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ml4core_cuda.kernels.short_shapes import ROWS, TURN
from ml4core_triton.kernels import chaining
from ml4core_triton.kernels.chaining import dependent
from ml4core_triton.kernels.numeric import next_power
from ml4core_triton.kernels.weights import WeightArgs

AHEAD = 6
"""Turns on their way: 24 KiB a program."""
REGISTERS = 128
"""Of a thread: four programs a multiprocessor."""

wait_for_previous = gluon.jit(chaining.wait_for_previous.fn)
let_next_begin = gluon.jit(chaining.let_next_begin.fn)

# A turn as words of 4 codes [16, 64], a thread's 16 bytes [16, 16] and its columns [256].
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
EACH = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0]))
COLUMNS = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 16], [2, 16], [4, 1], [1, 0])))
LINE = gl.constexpr(gl.SliceLayout(1, EACH.value))
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_STAGED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_STAGING = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))

_NUMBERS = gl.constexpr("""{
    .reg .b16 low, high, h0, h1, h2, h3;
    .reg .b32 a, b;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    mov.b32 {h0, h1}, a;
    mov.b32 {h2, h3}, b;
    cvt.f32.f16 $0, h0;
    cvt.f32.f16 $1, h1;
    cvt.f32.f16 $2, h2;
    cvt.f32.f16 $3, h3;
}""")
"""The four E4M3 bytes of a word in fp32."""


@gluon.jit
def turn_of(codes, scales, used, turn: gl.constexpr):
    """What is asked for of a turn: words of the codes and the scales of a thread's columns."""
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, WORDS)) + turn * 64
    block = gl.arange(0, 16, layout=gl.SliceLayout(0, EACH)) // 8 + turn * 2
    # No other program reads the codes: what the first cache has beside them stays there.
    found = gl.load(
        codes + gl.expand_dims(word, 0), mask=used, other=0, eviction_policy="evict_first"
    )
    return found, gl.load(scales + gl.expand_dims(block, 0), mask=used, other=0.0)


@gluon.jit
def product(words, scales, x):
    """fp32 [16, 16]: the sums of a thread's columns of each row, times the scales."""
    n0, n1, n2, n3 = gl.inline_asm_elementwise(
        _NUMBERS, "=f,=f,=f,=f,r", [words],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    even, odd = gl.split(gl.reshape(x.to(gl.float32), (64, 2, 2)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    found = n0 * _beside(x0)
    found = gl.fma(n1, _beside(x1), found)
    found = gl.fma(n2, _beside(x2), found)
    found = gl.fma(n3, _beside(x3), found)
    own = gl.sum(gl.reshape(found, (16, 16, 4)), 2)
    return gl.convert_layout(own, EACH, assert_trivial=True) * scales


@gluon.jit
def _beside(x):
    x = gl.convert_layout(x, gl.SliceLayout(0, WORDS), assert_trivial=True)
    return gl.broadcast(gl.expand_dims(x, 0), gl.zeros((16, 64), gl.float32, WORDS))[0]


@gluon.jit
def stage(x, held, TURNS: gl.constexpr, PLACES: gl.constexpr):
    """A row of the activation, bf16 [TURNS * 256], to shared memory [PLACES, 256]."""
    place = gl.expand_dims(gl.arange(0, PLACES, layout=gl.SliceLayout(1, _STAGING)), 1)
    column = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, _STAGING)), 0)
    found = gl.load(x + place * 256 + column, mask=(place < TURNS) & (column < 256), other=0.0)
    held._reinterpret(gl.bfloat16, [PLACES, 256], _STAGED).store(found)


@gluon.jit
def _row_kernel(
    x, data, scale, out, N,
    K: gl.constexpr, PLACES: gl.constexpr, MOST_AHEAD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A matrix [N, K] times each row, out [T, N]: grid (tiles of N, T)."""
    TURNS: gl.constexpr = K // 256
    ASKED: gl.constexpr = min(MOST_AHEAD, TURNS)
    token = gl.program_id(1).to(gl.int64)
    first = gl.program_id(0) * 16
    row = first + gl.arange(0, 16, layout=gl.SliceLayout(1, WORDS))
    lines = data.to(gl.pointer_type(gl.int32)) + gl.expand_dims(row.to(gl.int64) * (K // 4), 1)
    row = first + gl.arange(0, 16, layout=LINE)
    blocks = scale + gl.expand_dims(row // 128 * (K // 128), 1)
    ring = ()
    for turn in gl.static_range(ASKED):
        ring = ring + (turn_of(lines, blocks, True, turn),)
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    held = gl.allocate_shared_memory(gl.bfloat16, [PLACES, 256], LINES)
    stage(x + token * K, held, TURNS, PLACES)
    acc = gl.zeros((16, 16), gl.float32, EACH)
    for turn in gl.static_range(TURNS):
        acc += product(ring[0][0], ring[0][1], held.index(turn).load(COLUMNS))
        ring = ring[1:]
        if turn + ASKED < TURNS:
            ring = ring + (turn_of(lines, blocks, True, turn + ASKED),)
    gl.store(out + token * N + row, gl.sum(acc, 1).to(out.dtype.element_ty))


def row_product(x: Tensor, w: WeightArgs, out: Tensor, *, ahead: bool) -> None:
    """Fills ``out`` [T, N] with a matrix times each row of ``x`` bf16 [T, K], dense,
    as ``product_fits`` has them. ``ahead``: the
    launch may begin before the end of the one before it.
    """
    named: dict[str, Any] = {"num_warps": 4, "maxnreg": REGISTERS, **dependent(ahead)}
    _row_kernel[(w.rows // ROWS, len(x))](
        x, w.data, w.scale, out, w.rows,
        K=w.columns, PLACES=next_power(w.columns // TURN), MOST_AHEAD=AHEAD, DEPENDENT=ahead,
        **named,
    )  # fmt: skip
