"""Products of many rows with weights in ``fp8_block``, of e4m3 codes or of bf16 numbers.

Rows of the activation fill the tall side of the matrix units, rows of the weight the wide one: a
thread's results then share two scales of the activation and one of the weight, and both operands go
from memory to the matrix units by way of shared memory alone. A program takes two tiles of the
weight at a time against one of the activation, one after the other: it holds both sums and one that
is being made, of 64 numbers a thread each, and reads 48 KB for 8.4 MFLOP. What a block of 128
columns sums to is scaled and added in fp32.

Rate model of 4,096 x 6,144 x 6,144 on an H200: 309 GFLOP, 163 us at the units' peak; 128 additions
a thread and turn of 1,024 cycles make it 235 us where nothing hides them, and 1.8 GB from the
second cache 300 us at 6 TB/s.

Beside bf16 numbers the codes of the matrix are written out in bf16 first, which is exact and takes
113 MB, 27 us; two tiles of the activation then meet one of the weight in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_cuda.kernels.products import CODES_BY_BLOCK, PLAIN
from ml4core_triton.kernels.fp8 import decoded, fp8_value
from ml4core_triton.kernels.numeric import INTERPRETED, dot, narrow
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, WeightArgs

_TILE = tl.constexpr(K_TILE)
LEAST = 512
"""Rows from which on this is worth it, of codes; twice as many of numbers."""


@dataclass(frozen=True)
class ManyTiling:
    """How a product of many rows is cut.

    Attributes:
        rows: of the activation, a program.
        columns: rows of the weight a tile, of which a program takes two; 64 or 128.
        group: tiles of rows that go through all columns together.
    """

    rows: int = 128
    columns: int = 128
    group: int = 8
    warps: int = 8
    stages: int = 3


def serves(kind: int, dtype: torch.dtype, w: WeightArgs, rows: int) -> bool:
    """Whether these kernels take the product: codes by block, or bf16, and whole blocks."""
    whole = w.columns % K_TILE == 0 and w.rows % K_TILE == 0
    if w.format != FP8_BLOCK or w.matrices != 1 or not whole:
        return False
    numbers = kind == PLAIN and dtype == torch.bfloat16 and rows >= 2 * LEAST
    return numbers or (kind == CODES_BY_BLOCK and rows >= LEAST)


@triton.jit
def _codes(where):
    """Operands from pointers to e4m3 codes uint8."""
    if INTERPRETED:
        found = fp8_value(tl.load(where), False)
    else:
        found = tl.load(where.to(tl.pointer_type(tl.float8e4nv), bitcast=True))
    return found


@triton.jit
def two_sums(
    x, x_rows, x_scale, scale_rows, data, scale, first, second, K,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN] twice: rows of codes at offsets ``x_rows`` int64 [BM], whose scales lie at
    ``scale_rows``, times the rows [BN] of a matrix [N, K] from ``first``, and from ``second`` on;
    each BN rows lie in one block of scales.
    """
    k, column = tl.arange(0, _TILE), tl.arange(0, BN)
    blocks = K // _TILE
    left = x + x_rows[:, None] + k[None, :]
    one = data + (first + column).to(tl.int64)[None, :] * K + k[:, None]
    other = data + (second + column).to(tl.int64)[None, :] * K + k[:, None]
    one_scale = scale + (first // _TILE).to(tl.int64) * blocks
    other_scale = scale + (second // _TILE).to(tl.int64) * blocks
    acc = tl.zeros([BM, BN], tl.float32)
    more = tl.zeros([BM, BN], tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        k0 = block * _TILE
        of_row = tl.load(x_scale + scale_rows + block)
        codes = _codes(left + k0)
        each = dot(codes, _codes(one + k0), tl.zeros([BM, BN], tl.float32))
        acc += each * (of_row * tl.load(one_scale + block))[:, None]
        each = dot(codes, _codes(other + k0), tl.zeros([BM, BN], tl.float32))
        more += each * (of_row * tl.load(other_scale + block))[:, None]
    return acc, more


@triton.jit
def _product_kernel(
    x, x_scale, data, scale, out, T, N, K, x_row, scale_row, out_row,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of T x pairs of tiles of N,); rows of the activation in groups, so that both
    operands stay in the second cache.
    """
    down, across = tl.cdiv(T, BM), tl.cdiv(N, 2 * BN)
    group = tl.program_id(0) // (GROUP * across)
    first = group * GROUP
    held = tl.minimum(down - first, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    token = (first + inside % held) * BM + tl.arange(0, BM)
    start = (inside // held) * 2 * BN
    # What isn't there reads what is: rows of the last tile, and columns of the last.
    kept = tl.minimum(token, T - 1).to(tl.int64)
    second = start + BN
    if second >= N:
        second = start
    acc, more = two_sums(
        x, kept * x_row, x_scale, kept * scale_row, data, scale, start, second, K, BM, BN, STAGES,
    )  # fmt: skip
    column = start + tl.arange(0, BN)
    where = out + token.to(tl.int64)[:, None] * out_row + column[None, :]
    fits = (token < T)[:, None]
    tl.store(where, narrow(acc, out.dtype.element_ty), mask=fits)
    if start + BN < N:
        tl.store(where + BN, narrow(more, out.dtype.element_ty), mask=fits)


@triton.jit
def _wide_kernel(
    x, data, scale, out, T, N, K, x_row, out_row,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """bf16 rows times a matrix of codes in bf16: grid (pairs of tiles of T x tiles of N,)."""
    down, across = tl.cdiv(T, 2 * BM), tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP * across)
    first = group * GROUP
    held = tl.minimum(down - first, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    token = (first + inside % held) * 2 * BM + tl.arange(0, BM)
    start = (inside // held) * BN
    k, column = tl.arange(0, _TILE), start + tl.arange(0, BN)
    one = x + (tl.minimum(token, T - 1).to(tl.int64) * x_row)[:, None] + k[None, :]
    other = x + (tl.minimum(token + BM, T - 1).to(tl.int64) * x_row)[:, None] + k[None, :]
    matrix = data + column.to(tl.int64)[None, :] * K + k[:, None]
    blocks = K // _TILE
    scales = scale + (start // _TILE).to(tl.int64) * blocks
    acc = tl.zeros([BM, BN], tl.float32)
    more = tl.zeros([BM, BN], tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        k0 = block * _TILE
        factor = tl.load(scales + block)
        codes = tl.load(matrix + k0)
        acc += dot(tl.load(one + k0), codes, tl.zeros([BM, BN], tl.float32)) * factor
        more += dot(tl.load(other + k0), codes, tl.zeros([BM, BN], tl.float32)) * factor
    where = out + token.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(where, narrow(acc, out.dtype.element_ty), mask=(token < T)[:, None])
    where += BM * out_row
    tl.store(where, narrow(more, out.dtype.element_ty), mask=(token + BM < T)[:, None])


@triton.jit
def _decode_kernel(data, out, size, BLOCK: tl.constexpr):
    """Codes in bf16: grid (blocks,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(data + at, mask=at < size, other=0)
    tl.store(out + at, decoded(code, tl.bfloat16, False), mask=at < size)


def wide_product(x: Tensor, w: WeightArgs, out: Tensor, out_row: int, plan: ManyTiling) -> None:
    """Fills ``out`` [T, N] with bf16 rows ``x`` [T, K] times a matrix."""
    rows, size = x.shape[0], w.rows * w.columns
    codes = torch.empty(w.rows, w.columns, dtype=torch.bfloat16, device=x.device)
    _decode_kernel[(triton.cdiv(size, 4096),)](w.data, codes, size, BLOCK=4096, num_warps=4)
    grid = (triton.cdiv(rows, 2 * plan.rows) * triton.cdiv(w.rows, plan.columns),)
    _wide_kernel[grid](
        x, codes, w.scale, out, rows, w.rows, w.columns, x.stride(0), out_row,
        BM=plan.rows, BN=plan.columns, GROUP=plan.group, STAGES=plan.stages,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def product(
    x: Tensor, x_scale: Tensor, w: WeightArgs, out: Tensor, out_row: int, plan: ManyTiling
) -> None:
    """Fills ``out`` [T, N] with codes ``x`` [T, K] times a matrix. N is a multiple of the plan's
    columns.
    """
    rows = x.shape[0]
    grid = (triton.cdiv(rows, plan.rows) * triton.cdiv(w.rows, 2 * plan.columns),)
    _product_kernel[grid](
        x, x_scale, w.data, w.scale, out, rows, w.rows, w.columns, x.stride(0), x_scale.stride(0),
        out_row,
        BM=plan.rows, BN=plan.columns, GROUP=plan.group, STAGES=plan.stages,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
