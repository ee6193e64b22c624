"""``gemm``: x @ weight^T for weights in every open format.

Rate model (MI350X, 8 TB/s, bf16 2.3 PFLOP/s, FP8 4.6), 6144 x 6144 in ``fp8_block``: 1 to 64 rows
38 MB, 4.7 us, with K split over programs until all compute units read; partial sums are added in
order. 4,096 rows: 309 GFLOP, 134 us in bf16, 67 us with e4m3 activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import Weight
from ml4core_rocm.kernels.activations import Activation, activation
from ml4core_rocm.kernels.products import BY_ROW, tile_sum
from ml4core_triton.kernels.numeric import narrow, next_power
from ml4core_triton.kernels.sums import add_parts
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import K_TILE, WeightArgs, matrix_of, product_args, whole_scale

_BY_ROW = tl.constexpr(BY_ROW)
_TILE = tl.constexpr(K_TILE)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut.

    Attributes:
        columns: rows of the weight, columns of the result, a program.
        rows: rows of the activation a program.
        parts: programs that share the inner axis.
    """

    columns: int
    rows: int
    parts: int
    warps: int
    stages: int


def tiling(rows: int, columns: int, inner: int, matrices: int, units: int) -> Tiling:
    """The choice for a product of these sizes. Looks at sizes alone, so a graph can hold it."""
    many = min(64, max(16, next_power(rows)))
    each = 128 if rows > 64 else 64
    programs = matrices * -(-columns // each) * -(-rows // many)
    steps = -(-inner // K_TILE)
    parts = 1
    while programs * parts < 2 * units and 2 * parts <= min(16, steps // 2):
        parts *= 2
    return Tiling(each, many, parts, 8 if each == 128 else 4, 2)


@triton.jit
def tile_kernel(
    x,
    x_scale,
    data,
    scale,
    row_scale,
    out,
    T,
    N,
    K,
    x_matrix,
    x_row,
    scale_row,
    out_matrix,
    out_row,
    out_part,
    scale_size,
    steps,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FORMAT: tl.constexpr,
    ACT: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid (tiles of N x tiles of T, parts of K, matrices); part p writes at out + p * out_part."""
    part = tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    # Tiles of the weight in groups, all rows of the activation within one: both stay in L2.
    across = tl.cdiv(T, BM)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    held = tl.minimum(tl.cdiv(N, BN) - first, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    rows = (first + inside % held) * BN + tl.arange(0, BN)
    row_fits = rows < N
    tokens = (inside // held) * BM + tl.arange(0, BM)
    fits = tokens < T
    wide = tokens.to(tl.int64)
    begin = part * steps * _TILE
    data, scale, row_scale = matrix_of(data, scale, row_scale, matrix, N, K, scale_size, FORMAT)
    acc = tile_sum(
        x + matrix * x_matrix, wide * x_row, fits, x_scale, wide * scale_row, data, scale, rows,
        row_fits, begin, tl.minimum(begin + steps * _TILE, K), K, BN, BM, FORMAT, ACT, WIDE, CODES,
        _TILE,
    )  # fmt: skip
    acc = acc * whole_scale(scale, row_scale, rows, row_fits, FORMAT, BN)[None, :]
    if ACT == _BY_ROW:
        acc = acc * tl.load(x_scale + tokens, mask=fits, other=0.0)[:, None]
    where = out + part.to(tl.int64) * out_part + matrix * out_matrix
    where = where + wide[:, None] * out_row + rows[None, :]
    tl.store(where, narrow(acc, out.dtype.element_ty), mask=row_fits[None, :] & fits[:, None])


def gemm(
    x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None, *, act: str | None = None
) -> Tensor:
    """``x`` [T, K] times the transpose of a weight [N, K], to [T, N] in out_dtype or x's dtype.

    ``act`` quantises x first where the weight is quantised: fp8_block, fp8_tensor, mxfp4 or mxfp8.
    ``ValueError`` for shapes that don't belong together.
    """
    w = product_args(x, weight)
    out = torch.empty(x.shape[0], w.rows, dtype=out_dtype or x.dtype, device=x.device)
    if out.numel():
        multiply(activation(x, w, act), w, out, (0, 0, out.stride(0)))
    return out


def multiply(x: Activation, w: WeightArgs, out: Tensor, strides: tuple[int, int, int]) -> None:
    """Fills ``out`` with the products of each matrix.

    ``strides``: of the activation's and of out's matrices, and of out's rows. Rows of the
    activation lie ``x.stride`` apart; columns of out are contiguous.
    """
    x_matrix, out_matrix, out_row = strides
    plan = tiling(x.rows, w.rows, w.columns, w.matrices, units_of(out.device))
    steps = triton.cdiv(triton.cdiv(w.columns, K_TILE), plan.parts)
    target, part = out, 0
    if plan.parts > 1:
        part = out.numel()
        target = torch.empty(plan.parts, *out.shape, dtype=torch.float32, device=out.device)
    tiles = triton.cdiv(w.rows, plan.columns) * triton.cdiv(x.rows, plan.rows)
    tile_kernel[(tiles, plan.parts, w.matrices)](
        x.data, x.scale, w.data, w.scale, w.row_scale, target, x.rows, w.rows, w.columns,
        x_matrix, x.stride, x.scale_stride, out_matrix, out_row, part, w.scale_size, steps,
        BN=plan.columns, BM=plan.rows, FORMAT=w.format, ACT=x.kind, WIDE=x.wide,
        CODES=x.codes, GROUP=8, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if plan.parts > 1:
        add_parts(target, out)
