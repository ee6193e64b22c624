"""All projections of a layer's attention in one launch, for a few rows.

The matrices stay where they are: a program takes a tile of one of them, in the order query, latent,
index query, index key, after those of the index weights, which are fp32 and take longest. Results
are fp32 and not rounded: [parts, T, C], the matrices' rows side by side.

Rate model of one rank of eight of the full model at one row: 5,824 rows of 6,144 e4m3 codes and 32
of fp32, 36.6 MB, 8.6 us at 4.25 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_cuda.kernels.gemm import gemm, row_block, row_tiling
from ml4core_cuda.kernels.prefetch import prefetch_rows
from ml4core_cuda.kernels.products import tile_sum
from ml4core_cuda.kernels.row_sums import TOGETHER, row_sum
from ml4core_cuda.kernels.target import device_name, most_registers
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import (
    BF16,
    FORMAT_NAMES,
    FP8_BLOCK,
    FP32,
    K_TILE,
    WeightArgs,
    whole_scale,
)

_TILE = tl.constexpr(K_TILE)
_FP32, _BF16, _TOGETHER = tl.constexpr(FP32), tl.constexpr(BF16), tl.constexpr(TOGETHER)
FUSED = (FP32, BF16, FP8_BLOCK)
"""Formats that one launch takes; with others each matrix has its own."""

_FINE = 4
"""Rows of a tile of the index weights, of which each has four times the bytes."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of the launch.

    Attributes:
        columns: rows of a matrix, columns of the result, a program.
        block: columns of a matrix a turn, for a single row.
        parts: programs that share the inner axis, for several rows.
    """

    columns: int
    block: int
    parts: int
    warps: int
    stages: int


def tiling(rows: int, columns: int, inner: int, units: int) -> Tiling:
    """The default, by shapes alone."""
    if rows == 1:
        row = row_tiling(columns, inner, 1, units)
        return Tiling(row.columns, row.block, 1, row.warps, row.stages)
    parts, steps = 1, -(-inner // K_TILE)
    while -(-columns // 64) * parts < 2 * units and 2 * parts <= min(8, steps // 2):
        parts *= 2
    return Tiling(64, K_TILE, parts, 4, 4)


def shape_key(format: str, rows: int, columns: int, inner: int) -> str:
    """The shape by which sizes are measured."""
    return f"{format} {columns}x{inner}, {triton.next_power_of_2(rows)} rows"


@triton.jit
def _some(
    x, x_rows, x_fits, data, scale, tile, N, K, begin, end, out, out_row,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of one matrix [N, K] times the rows, to ``out`` [.., N]; BM is 1 for a single row."""
    rows = tile * BN + tl.arange(0, BN)
    fits = rows < N
    if BM == 1:
        found = row_sum(x, data, scale, rows, fits, K, BN, BK, FORMAT, STAGES, _TOGETHER, EVEN)
        found = found * whole_scale(scale, scale, rows, fits, FORMAT, BN)
        tl.store(out + rows, found, mask=fits)
    else:
        found = tile_sum(
            x, x_rows, x_fits, x, x_rows, data, scale, rows, fits, begin, end, K,
            BN, BM, FORMAT, 0, WIDE, True, EVEN,
        )  # fmt: skip
        token = tl.arange(0, BM).to(tl.int64)
        where = out + token[None, :] * out_row + rows[:, None]
        tl.store(where, found, mask=fits[:, None] & x_fits[None, :])


@triton.jit
def _row_by_row(
    x, x_row, T, data, tile, N, K, part, parts, out, out_row,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of an fp32 matrix times the rows, each whole by one part and zero by the others: the
    matrix units would have to be fed with more registers than there are.
    """
    rows = tile * BN + tl.arange(0, BN)
    fits = rows < N
    for token in range(T):
        found = tl.zeros([BN], tl.float32)
        if token % parts == part:
            one = x + token * x_row
            found = row_sum(one, data, data, rows, fits, K, BN, BK, _FP32, STAGES, _TOGETHER, EVEN)
        tl.store(out + token * out_row + rows, found, mask=fits)


@triton.jit
def _prefetch(data, tile, N, K, BN: tl.constexpr, FORMAT: tl.constexpr):
    """A tile of one matrix, of a format in ``FUSED``."""
    SIZE: tl.constexpr = 4 if FORMAT == _FP32 else (2 if FORMAT == _BF16 else 1)
    rows = tile * BN + tl.arange(0, BN)
    prefetch_rows(data, rows, rows < N, K, SIZE, True)


@triton.jit
def _project_kernel(
    x, x_row, T, K, out, out_part, out_row, steps,
    d0, s0, n0, d1, s1, n1, d2, s2, n2, d3, s3, n3, d4, n4,
    t4, t0, t1, t2,
    F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, BKW: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, EVEN_W: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, parts). Tiles below t4 are of the index weights, those below t0 of the query,
    and so on; matrix i has n_i rows.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    let_next_begin(DEPENDENT)
    if DEPENDENT:  # the weights are on their way while the launch before runs
        if part > 0:
            pass
        elif tile < t4:
            _prefetch(d4, tile, n4, K, BW, _FP32)
        elif tile < t0:
            _prefetch(d0, tile - t4, n0, K, BN, F0)
        elif tile < t1:
            _prefetch(d1, tile - t0, n1, K, BN, F1)
        elif tile < t2:
            _prefetch(d2, tile - t1, n2, K, BN, F2)
        else:
            _prefetch(d3, tile - t2, n3, K, BN, F3)
    wait_for_previous(DEPENDENT)
    token = tl.arange(0, BM)
    fits = token < T
    x_rows = token.to(tl.int64) * x_row
    begin = part * steps * _TILE
    end = tl.minimum(begin + steps * _TILE, K)
    out += part.to(tl.int64) * out_part
    if tile < t4:
        _row_by_row(
            x, x_row, T, d4, tile, n4, K, part, tl.num_programs(1), out + (n0 + n1 + n2 + n3),
            out_row, BW, BKW, STAGES, EVEN_W,
        )  # fmt: skip
    elif tile < t0:
        _some(
            x, x_rows, fits, d0, s0, tile - t4, n0, K, begin, end, out, out_row,
            BN, BM, BK, F0, WIDE, STAGES, EVEN,
        )  # fmt: skip
    elif tile < t1:
        _some(
            x, x_rows, fits, d1, s1, tile - t0, n1, K, begin, end, out + n0, out_row,
            BN, BM, BK, F1, WIDE, STAGES, EVEN,
        )  # fmt: skip
    elif tile < t2:
        _some(
            x, x_rows, fits, d2, s2, tile - t1, n2, K, begin, end, out + (n0 + n1), out_row,
            BN, BM, BK, F2, WIDE, STAGES, EVEN,
        )  # fmt: skip
    else:
        _some(
            x, x_rows, fits, d3, s3, tile - t2, n3, K, begin, end, out + (n0 + n1 + n2), out_row,
            BN, BM, BK, F3, WIDE, STAGES, EVEN,
        )  # fmt: skip


def projected(
    x: Tensor, matrices: Sequence[WeightArgs | None], weights: WeightArgs | None, ahead: bool
) -> Tensor:
    """fp32 [parts, T, C] of rows ``x`` [T, K], to be added over parts: the products with the query,
    latent, index query and index key ``matrices``, and with the index ``weights``, side by side.

    ``ahead``: the launch may begin before the end of the one before it.
    """
    rows, inner = x.shape
    given = [one for one in matrices if one is not None]
    counts = [0 if one is None else one.rows for one in matrices]
    extra = 0 if weights is None else weights.rows
    columns = sum(counts) + extra
    first = given[0]
    name = FORMAT_NAMES[first.format]
    plan = tiling(rows, columns, inner, units_of(x.device))
    plan = sizes_for(
        "attn_inputs", device_name(x.device), shape_key(name, rows, columns, inner), plan
    )
    steps = triton.cdiv(triton.cdiv(inner, K_TILE), plan.parts)
    out = torch.empty(plan.parts, rows, columns, dtype=torch.float32, device=x.device)
    edges = [-(-extra // _FINE)]
    block = row_block(inner)
    for count in counts:
        edges.append(edges[-1] + -(-count // plan.columns))
    parts = [first if one is None else one for one in matrices]
    last = (first if weights is None else weights).data
    wide = torch.float32 in (x.dtype, *(one.data.dtype for one in given))
    many = 1 if rows == 1 else max(16, triton.next_power_of_2(rows))
    # Every matrix has tiles of its own in flight: of fp32 there is room for one beside the next.
    stages = min(plan.stages, 2) if wide else plan.stages
    _project_kernel[(edges[-1], plan.parts)](
        x, x.stride(0), rows, inner, out, out.stride(0), out.stride(1), steps,
        *(each for one, count in zip(parts, counts, strict=True)
          for each in (one.data, one.scale, count)),
        last, extra, *edges[:4],
        F0=parts[0].format, F1=parts[1].format, F2=parts[2].format, F3=parts[3].format,
        BN=plan.columns, BM=many, BK=plan.block, BW=_FINE, BKW=block,
        WIDE=tl.float32 if wide else tl.bfloat16, STAGES=stages,
        EVEN=inner % plan.block == 0, EVEN_W=inner % block == 0,
        DEPENDENT=ahead, num_warps=plan.warps, num_stages=stages,
        maxnreg=most_registers(plan.warps),
        **dependent(ahead),
    )  # fmt: skip
    return out


def separately(x: Tensor, matrices: Sequence[object]) -> Tensor:
    """The same, one product after the other, where one launch doesn't take the formats."""
    found = [gemm(x, one, torch.float32) for one in matrices]  # type: ignore[arg-type]
    return torch.cat(found, 1).unsqueeze(0)
