"""``gemm``: x @ weight^T for weights in every open format.

Rate model (H200: 4.25 TB/s, bf16 741 TFLOP/s, fp8 1,255 TFLOP/s), 6144 x 6144 in ``fp8_block``:

- 1 row: 37.7 MB of codes, so 8.9 us. ``row_sum`` takes 16 rows of the weight a program: 384
  programs, three on each of 132 multiprocessors. 3.3 instructions an element in fp32 take 3.7 us of
  issue, behind the bytes; of FP4, 21 MB and 5.0 us, 4.5 instructions take 5.1 us.
- 2 to 64 rows: the same bytes through the matrix units, with K split over programs until there are
  enough to keep the memory busy; partial sums (64 rows, 4 parts: 6 MB, in L2) are added in order.
- 4,096 rows: 309 GFLOP, 417 us in bf16, 246 us with e4m3 activations: see ``many_rows``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import Weight
from ml4core_cuda.kernels import many_rows
from ml4core_cuda.kernels.activations import Activation, activation
from ml4core_cuda.kernels.products import (
    CODES_BY_ROW,
    KIND_NAMES,
    PLAIN,
    stages_within,
    tile_sum,
)
from ml4core_cuda.kernels.row_sums import TOGETHER, row_sum
from ml4core_cuda.kernels.target import arch_of, device_name
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels.numeric import narrow, next_power
from ml4core_triton.kernels.sums import add_parts
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import (
    FORMAT_NAMES,
    K_TILE,
    WeightArgs,
    is_fp4,
    product_args,
    whole_scale,
)

_BY_ROW, _TOGETHER = tl.constexpr(CODES_BY_ROW), tl.constexpr(TOGETHER)
_TILE = tl.constexpr(K_TILE)


@dataclass(frozen=True)
class RowTiling:
    """How a product with a single row is cut.

    Attributes:
        columns: rows of the weight, columns of the result, a program.
        block: columns of the weight a turn.
    """

    columns: int
    block: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
        columns: rows of the weight, columns of the result, a program.
        rows: rows of the activation a program, at least 16.
        parts: programs that share the inner axis.
    """

    columns: int
    rows: int
    parts: int
    warps: int
    stages: int


def row_block(inner: int) -> int:
    """Columns of a turn of ``row_sum``: a power of two that divides ``inner``, if a large one does;
    else one that holds it.
    """
    most = inner & -inner
    return min(1024, most if most >= 512 else max(K_TILE, next_power(inner)))


def row_tiling(columns: int, inner: int, matrices: int, multiprocessors: int) -> RowTiling:
    """The default of ``row_sum``: 16 rows of the weight a program, or 8 where there are few."""
    few = matrices * -(-columns // 16) < multiprocessors
    return RowTiling(8 if few else 16, row_block(inner))


def tiling(
    rows: int,
    columns: int,
    inner: int,
    matrices: int,
    multiprocessors: int,
    quantized: bool = False,
    fp4: bool = False,
    arch: str = "sm_90",
) -> Tiling:
    """The choice for a product of these sizes. Looks at sizes alone, so a graph can hold it.

    ``quantized``: whether the activation is; ``fp4``: whether the weight is in FP4.
    """
    # Both sums of a tile, of a block and of all, are in registers: sm_100 has room for half.
    most = 64 if quantized and arch != "sm_90" else 128
    many = min(most, max(16, next_power(rows)))
    each = 128 if rows > 64 or fp4 else 64  # FP4: reading the activation costs as its codes do
    programs = matrices * -(-columns // each) * -(-rows // many)
    steps = -(-inner // K_TILE)
    parts = 1
    while programs * parts < 2 * multiprocessors and 2 * parts <= min(16, steps // 2):
        parts *= 2
    warps = 8 if fp4 or each * many >= 128 * 64 else 4
    return Tiling(each, many, parts, warps, 3 if rows > 64 else 4)


def shape_key(format: str, rows: int, columns: int, inner: int, act: str) -> str:
    """The shape by which sizes are measured."""
    return f"{format} {columns}x{inner}, {next_power(rows)} rows of {act}"


@triton.jit
def _row_kernel(
    x, data, scale, row_scale, out, N, K, x_matrix, x_row, out_matrix, scale_size,
    BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """One row of the activation with each matrix of a stack: grid (tiles of N, matrices)."""
    matrix = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = rows < N
    scales = scale + matrix * scale_size
    STORED: tl.constexpr = 2 if FORMAT >= 4 else 1
    found = row_sum(
        x + matrix * x_matrix, data + matrix * N * (K // STORED), scales, rows, fits, K, BN, BK,
        FORMAT, STAGES, _TOGETHER, EVEN,
    )  # fmt: skip
    found = found * whole_scale(scales, row_scale + matrix * N, rows, fits, FORMAT, BN)
    tl.store(out + matrix * out_matrix + rows, narrow(found, out.dtype.element_ty), mask=fits)


@triton.jit
def _tile_kernel(
    x, x_scale, data, scale, row_scale, out, T, N, K, x_matrix, x_row, scale_row, out_matrix,
    out_row, out_part, scale_size, steps,
    BN: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N x tiles of T, parts of K, matrices); part p writes at out + p * out_part."""
    matrix = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    # Tiles of the weight in groups, all rows of the activation within one: both stay in L2.
    across = tl.cdiv(T, BM)
    group = tl.program_id(0) // (GROUP * across)
    first = group * GROUP
    held = tl.minimum(tl.cdiv(N, BN) - first, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    rows = (first + inside % held) * BN + tl.arange(0, BN)
    row_fits = rows < N
    tokens = (inside // held) * BM + tl.arange(0, BM)
    fits = tokens < T
    offsets = tokens.to(tl.int64) * x_row
    scales = scale + matrix * scale_size
    STORED: tl.constexpr = 2 if FORMAT >= 4 else 1
    begin = part * steps * _TILE
    acc = tile_sum(
        x + matrix * x_matrix, offsets, fits, x_scale, tokens.to(tl.int64) * scale_row,
        data + matrix * N * (K // STORED), scales, rows, row_fits, begin,
        tl.minimum(begin + steps * _TILE, K), K, BN, BM, FORMAT, ACT, WIDE, True, EVEN,
    )  # fmt: skip
    acc = acc * whole_scale(scales, row_scale + matrix * N, rows, row_fits, FORMAT, BN)[:, None]
    if ACT == _BY_ROW:
        acc = acc * tl.load(x_scale + tokens, mask=fits, other=0.0)[None, :]
    where = out + part.to(tl.int64) * out_part + matrix * out_matrix
    where = where + tokens.to(tl.int64)[None, :] * out_row + rows[:, None]
    tl.store(where, narrow(acc, out.dtype.element_ty), mask=row_fits[:, None] & fits[None, :])


def gemm(
    x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None, *, act: str | None = None
) -> Tensor:
    """``x`` [T, K] times the transpose of a weight [N, K], to [T, N] in out_dtype or x's dtype.

    ``act`` quantises x first where the weight is quantised: fp8_block, fp8_tensor or mxfp4.
    ``ValueError`` for shapes that don't belong together.
    """
    args = product_args(x, weight)
    out = torch.empty(x.shape[0], args.rows, dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        multiply(activation(x, args, act), args, out, (0, 0, out.stride(0)))
    return out


def multiply(x: Activation, w: WeightArgs, out: Tensor, strides: tuple[int, int, int]) -> None:
    """Fills ``out`` with the products of each matrix.

    ``strides``: of the activation's and of out's matrices, and of out's rows. Rows of the
    activation lie ``x.stride`` apart; columns of out are contiguous.
    """
    x_matrix, out_matrix, out_row = strides
    units, name = units_of(out.device), device_name(out.device)
    shape = shape_key(FORMAT_NAMES[w.format], x.rows, w.rows, w.columns, KIND_NAMES[x.kind])
    if x.rows == 1 and x.kind == PLAIN:  # a single row has a path of its own, but for codes
        row = row_tiling(w.rows, w.columns, w.matrices, units)
        if w.matrices == 1:
            row = sizes_for("gemm_row", name, shape, row)
        grid: tuple[int, ...] = (triton.cdiv(w.rows, row.columns), w.matrices)
        _row_kernel[grid](
            x.data, w.data, w.scale, w.row_scale, out, w.rows, w.columns, x_matrix, x.stride,
            out_matrix, w.scale_size,
            BN=row.columns, BK=row.block, FORMAT=w.format, STAGES=row.stages,
            EVEN=w.columns % row.block == 0, num_warps=row.warps,
        )  # fmt: skip
        return
    if many_rows.serves(x.kind, x.data.dtype, w, x.rows):
        whole = many_rows.ManyTiling(stages=2 if x.kind == PLAIN else 3)
        whole = sizes_for("gemm_many", name, shape, whole)
        if x.kind == PLAIN:
            many_rows.wide_product(x.data, w, out, out_row, whole)
        else:
            many_rows.product(x.data, x.scale, w, out, out_row, whole)
        return
    plan = tiling(
        x.rows, w.rows, w.columns, w.matrices, units, x.kind != PLAIN, is_fp4(w.format),
        arch_of(out.device),
    )  # fmt: skip
    if w.matrices == 1:
        plan = sizes_for("gemm_tile", name, shape, plan)
    steps = triton.cdiv(triton.cdiv(w.columns, K_TILE), plan.parts)
    target, part = out, 0
    if plan.parts > 1:
        part = out.numel()
        target = torch.empty(plan.parts, *out.shape, dtype=torch.float32, device=out.device)
    tiles = triton.cdiv(w.rows, plan.columns) * triton.cdiv(x.rows, plan.rows)
    _tile_kernel[(tiles, plan.parts, w.matrices)](
        x.data, x.scale, w.data, w.scale, w.row_scale, target, x.rows, w.rows, w.columns,
        x_matrix, x.stride, x.scale_stride, out_matrix, out_row, part, w.scale_size, steps,
        BN=plan.columns, BM=plan.rows, FORMAT=w.format, ACT=x.kind, WIDE=x.meets(w), GROUP=8,
        EVEN=w.columns % K_TILE == 0,
        num_warps=plan.warps,
        num_stages=stages_within(plan.stages, plan.columns, plan.rows, w.data, x.data),
    )  # fmt: skip
    if plan.parts > 1:
        add_parts(target, out)
