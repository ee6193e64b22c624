"""Routed experts of a single row, or of a few: each chosen expert is a product with one row.

Two launches. The first takes a few rows of w1 and w3 of one choice a program; the second a few rows
of w2 of every choice, in their order, so that the weighted sum never leaves the registers.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from ml4core_cuda.kernels import moe_fp4
from ml4core_cuda.kernels.expert_matrix import expert_matrix
from ml4core_cuda.kernels.gemm import RowTiling, row_tiling
from ml4core_cuda.kernels.prefetch import prefetch_rows
from ml4core_cuda.kernels.row_sums import APART, IN_TURN, TOGETHER, row_sum
from ml4core_cuda.kernels.short_shapes import experts_fit
from ml4core_cuda.kernels.target import device_name
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.numeric import narrow
from ml4core_triton.kernels.silu_mul import silu
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import FORMAT_NAMES, WeightArgs, whole_scale

_APART, _IN_TURN = tl.constexpr(APART), tl.constexpr(IN_TURN)
_TOGETHER = tl.constexpr(TOGETHER)


@triton.jit
def _gated_row_kernel(
    x, data, scale, row_scale, shared, shared_scale, shared_row_scale, weights, ids, out, W, K,
    scale_size, first_expert, E,
    BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """silu(w1 x) * (w3 x) of each choice, out [T, topk, W]: grid (tiles of W, topk, T). ``WHOLE``:
    W is a multiple of 128, and so of BN.
    """
    choice, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += token * K
    weights += token * tl.num_programs(1)
    ids += token * tl.num_programs(1)
    out += token * tl.num_programs(1) * W
    STORED: tl.constexpr = 2 if FORMAT >= 4 else 1
    SIZE: tl.constexpr = data.dtype.element_ty.primitive_bitwidth // 8
    # Rows of w1 and of w3 in turn, so that one loop reads both.
    index = tl.arange(0, 2 * BN)
    row = tl.program_id(0) * BN + index // 2
    rows, fits = row + (index % 2) * W, row < W
    if SHARED and choice == tl.num_programs(1) - 1:
        prefetch_rows(shared, rows, fits, K // STORED, SIZE, DEPENDENT)
    wait_for_previous(DEPENDENT)
    expert = tl.load(ids + choice) - first_expert
    if (expert >= 0) & (expert < E + SHARED) & (tl.load(weights + choice) != 0):
        data, scale, row_scale = expert_matrix(
            data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, 2 * W, K,
            scale_size, FORMAT, SHARED,
        )  # fmt: skip
        found = row_sum(
            x, data, scale, rows, fits, K, 2 * BN, BK, FORMAT, STAGES,
            _IN_TURN if WHOLE else _APART, EVEN,
        )  # fmt: skip
        found = found * whole_scale(scale, row_scale, rows, fits, FORMAT, 2 * BN)
        gate, up = tl.split(tl.reshape(found, (BN, 2)))
        inner = narrow(silu(gate) * up, out.dtype.element_ty)
        column = tl.program_id(0) * BN + tl.arange(0, BN)
        tl.store(out + choice * W + column, inner, mask=column < W)
    # Late, as what comes up would take registers that this launch's own programs need.
    let_next_begin(DEPENDENT)


@triton.jit
def _outer_row_kernel(
    x, data, scale, row_scale, shared, shared_scale, shared_row_scale, weights, ids, out, H, K,
    scale_size, first_expert, E,
    TOPK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    SHARED: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weighted sum of w2 times x [T, topk, K], out [T, H]: grid (tiles of H, T)."""
    token = tl.program_id(1).to(tl.int64)
    x += token * TOPK * K
    weights += token * TOPK
    ids += token * TOPK
    out += token * H
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = rows < H
    STORED: tl.constexpr = 2 if FORMAT >= 4 else 1
    SIZE: tl.constexpr = data.dtype.element_ty.primitive_bitwidth // 8
    let_next_begin(DEPENDENT)
    if SHARED:
        prefetch_rows(shared, rows, fits, K // STORED, SIZE, DEPENDENT)
    wait_for_previous(DEPENDENT)
    total = tl.zeros([BN], tl.float32)
    for choice in range(TOPK):
        expert = tl.load(ids + choice) - first_expert
        weight = tl.load(weights + choice)
        if (expert >= 0) & (expert < E + SHARED) & (weight != 0):
            matrix, scales, row_scales = expert_matrix(
                data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, H, K,
                scale_size, FORMAT, SHARED,
            )  # fmt: skip
            found = row_sum(
                x + choice * K, matrix, scales, rows, fits, K, BN, BK, FORMAT, STAGES, _TOGETHER,
                EVEN,
            )  # fmt: skip
            found = found * whole_scale(scales, row_scales, rows, fits, FORMAT, BN)
            total += found * weight
    tl.store(out + rows, narrow(total, out.dtype.element_ty), mask=fits)


def shape_key(format: str, part: str, columns: int, inner: int, topk: int) -> str:
    """The shape by which sizes are measured; ``part`` is gated or outer."""
    return f"{format} {part} {columns}x{inner}, {topk} choices"


def rows_apart(
    x: Tensor,
    w13: WeightArgs,
    w2: WeightArgs,
    shared: tuple[WeightArgs, WeightArgs] | None,
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
    out: Tensor,
    *,
    ahead: bool = False,
) -> None:
    """Fills ``out`` [T, H] with the experts ``ids`` [T, topk] of ``x`` [T, H], each row by itself.
    With ``shared`` (its w13 and w2), id E is that expert, and the last choice. ``ahead``: the
    launches may begin before the end of the one before each.
    """
    if moe_fp4.serves(x, w13, w2):
        moe_fp4.rows_apart(x, w13, w2, shared, weights, ids, first_expert, out, ahead=ahead)
        return
    if experts_fit(x, w13, w2, ids.shape[1]):
        from ml4core_cuda.kernels import short_experts

        short_experts.launch(
            x, w13, w2, shared, weights, ids, out, count=ids.shape[1], first_expert=first_expert,
            ahead=ahead,
        )  # fmt: skip
        return
    (rows, topk), units, name = ids.shape, units_of(x.device), device_name(x.device)

    def sizes(part: str, w: WeightArgs, columns: int, matrices: int) -> RowTiling:
        default = row_tiling(columns, w.columns, matrices * rows, units)
        if part == "gated":  # two rows a column
            default = replace(default, columns=max(2, default.columns // 2))
        shape = shape_key(FORMAT_NAMES[w.format], part, columns, w.columns, topk)
        return sizes_for("moe_row", name, shape, default)

    other13, other2 = shared or (w13, w2)
    inner = x.new_empty(rows, topk, w2.columns)
    plan = sizes("gated", w13, w2.columns, topk)
    _gated_row_kernel[(triton.cdiv(w2.columns, plan.columns), topk, rows)](
        x, w13.data, w13.scale, w13.row_scale, other13.data, other13.scale, other13.row_scale,
        weights, ids, inner, w2.columns, w13.columns,
        w13.scale_size, first_expert, w13.matrices,
        BN=plan.columns, BK=plan.block, FORMAT=w13.format,
        SHARED=int(shared is not None), STAGES=plan.stages, WHOLE=w2.columns % 128 == 0,
        EVEN=w13.columns % plan.block == 0, DEPENDENT=ahead, num_warps=plan.warps,
        **dependent(ahead),
    )  # fmt: skip
    plan = sizes("outer", w2, w2.rows, 1)
    _outer_row_kernel[(triton.cdiv(w2.rows, plan.columns), rows)](
        inner, w2.data, w2.scale, w2.row_scale, other2.data, other2.scale, other2.row_scale,
        weights, ids, out, w2.rows, w2.columns, w2.scale_size, first_expert, w2.matrices,
        TOPK=topk, BN=plan.columns, BK=plan.block, FORMAT=w2.format,
        SHARED=int(shared is not None), STAGES=plan.stages, EVEN=w2.columns % plan.block == 0,
        DEPENDENT=ahead, num_warps=plan.warps, **dependent(ahead),
    )  # fmt: skip
