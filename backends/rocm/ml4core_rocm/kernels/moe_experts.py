"""``moe_experts``: the weighted sum of routed experts, SwiGLU each.

Rate model (MI350X, 8 TB/s; a rank of TP 4: 128 experts of 1,536 x 6,144 in MXFP4, 15 MB each,
top-4): 1 row 60 MB, 7.5 us; 64 rows touch about 111 experts, 1.7 GB, 0.21 ms. An expert's rows
share a tile, so each touched expert is read once.

The order of choices, w13 with the gate in its epilogue, w2 into fp32, and the sum over choices, in
their order, cast once; between them, where activations are quantised, their codes.
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
from ml4core_triton.kernels.expert_order import ExpertOrder, expert_order
from ml4core_triton.kernels.numeric import narrow, next_power
from ml4core_triton.kernels.sums import combine
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import (
    WeightArgs,
    check_experts,
    matrix_of,
    weight_args,
    whole_scale,
)

_BY_ROW = tl.constexpr(BY_ROW)


@dataclass(frozen=True)
class MoETiling:
    """Sizes of a program.

    Attributes:
        columns: of an expert's result.
        rows: of its tile.
        step: columns of the inner axis that are asked for at a time.
    """

    columns: int
    rows: int
    step: int
    warps: int
    stages: int


def moe_tiling(
    rows: int, topk: int, experts: int, columns: int, units: int, grouped: bool
) -> MoETiling:
    """The choice for these sizes. A tile holds twice the mean of an expert's rows, where it can.

    ``grouped``: whether scales go into the matrix units. Then a program takes 16 columns and asks
    for 4 KB of a matrix at a time, three times ahead, while there are few programs: what counts is
    how many bytes are on their way. It has two waves: with one the compiler decodes to bf16.
    """
    choices = rows * topk
    many = min(64, max(16, next_power(2 * -(-choices // experts))))
    many = min(many, max(16, next_power(choices)))
    tiles = min(choices, experts + choices // many)
    if grouped and many == 16:
        if tiles * -(-columns // 32) < 8 * units:
            return MoETiling(16, many, 512, 2, 4)
        return MoETiling(32, many, 256, 2, 3)
    each = 64
    while each > 32 and tiles * -(-columns // each) < 2 * units:
        each //= 2
    return MoETiling(each, many, 128, 4, 2)


@triton.jit
def silu(x):
    """x * sigmoid(x) in fp32, without overflow."""
    small = tl.exp(-tl.abs(x))
    return x * tl.div_rn(tl.where(x < 0, small, 1.0), 1.0 + small)


@triton.jit
def gated_kernel(
    x,
    x_scale,
    data,
    scale,
    row_scale,
    order,
    tiles,
    out,
    W,
    K,
    topk,
    x_row,
    scale_row,
    scale_size,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FORMAT: tl.constexpr,
    ACT: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    STEP: tl.constexpr,
):
    """silu(w1 x) * (w3 x) at the choice's row of out [T topk, W]: grid (tiles of W, tiles)."""
    tile = tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count > 0:
        expert = tl.load(tile).to(tl.int64)
        place = tl.arange(0, BM)
        fits = place < count
        choice = tl.load(order + tl.load(tile + 1) + place, mask=fits, other=0)
        token = (choice // topk).to(tl.int64)
        # A gate's row and its up row side by side: both are asked for at once, and their sums stand
        # beside one another.
        pair = tl.arange(0, 2 * BN)
        own = tl.program_id(0) * BN + pair // 2
        rows, row_fits = own + (pair % 2) * W, own < W
        data, scale, row_scale = matrix_of(
            data, scale, row_scale, expert, 2 * W, K, scale_size, FORMAT
        )
        both = tile_sum(
            x, token * x_row, fits, x_scale, token * scale_row, data, scale, rows, row_fits, 0, K,
            K, 2 * BN, BM, FORMAT, ACT, WIDE, CODES, STEP,
        )  # fmt: skip
        both = both * whole_scale(scale, row_scale, rows, row_fits, FORMAT, 2 * BN)[None, :]
        if ACT == _BY_ROW:
            both = both * tl.load(x_scale + token, mask=fits, other=0.0)[:, None]
        gate, up = tl.split(tl.reshape(both, (BM, BN, 2)))
        column = tl.program_id(0) * BN + tl.arange(0, BN)
        where = out + choice.to(tl.int64)[:, None] * W + column[None, :]
        inner = narrow(silu(gate) * up, out.dtype.element_ty)
        tl.store(where, inner, mask=(column < W)[None, :] & fits[:, None])


@triton.jit
def outer_kernel(
    x,
    x_scale,
    data,
    scale,
    row_scale,
    order,
    tiles,
    out,
    H,
    K,
    x_row,
    scale_row,
    scale_size,
    BN: tl.constexpr,
    BM: tl.constexpr,
    FORMAT: tl.constexpr,
    ACT: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    STEP: tl.constexpr,
):
    """w2 times inner rows at the choice's row of out fp32 [T topk, H]: grid (tiles of H, tiles)."""
    tile = tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count > 0:
        expert = tl.load(tile).to(tl.int64)
        place = tl.arange(0, BM)
        fits = place < count
        choice = tl.load(order + tl.load(tile + 1) + place, mask=fits, other=0).to(tl.int64)
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        row_fits = rows < H
        data, scale, row_scale = matrix_of(data, scale, row_scale, expert, H, K, scale_size, FORMAT)
        found = tile_sum(
            x, choice * x_row, fits, x_scale, choice * scale_row, data, scale, rows, row_fits, 0, K,
            K, BN, BM, FORMAT, ACT, WIDE, CODES, STEP,
        )  # fmt: skip
        found = found * whole_scale(scale, row_scale, rows, row_fits, FORMAT, BN)[None, :]
        if ACT == _BY_ROW:
            found = found * tl.load(x_scale + choice, mask=fits, other=0.0)[:, None]
        where = out + choice[:, None] * H + rows[None, :]
        tl.store(where, found, mask=row_fits[None, :] & fits[:, None])


def moe_experts(
    x: Tensor,
    w13: Weight,
    w2: Weight,
    weights: Tensor,
    ids: Tensor,
    first_expert: int | None = None,
    *,
    act: str | None = None,
) -> Tensor:
    """The weighted sum of experts ``ids`` [T, topk] on ``x`` [T, H], in x's dtype.

    ``act`` quantises the input of both products: fp8_block, fp8_tensor, mxfp4 or mxfp8.
    ``ValueError`` for shapes that don't belong together.
    """
    inner, outer = weight_args(w13), weight_args(w2)
    check_experts(x, inner, outer, weights, ids)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    first = first_expert or 0
    weights, ids = weights.contiguous(), ids.contiguous()
    rows, topk = ids.shape
    units, experts, width = units_of(x.device), inner.matrices, outer.columns
    own = activation(x, inner, act)
    plan = moe_tiling(rows, topk, experts, width, units, own.grouped)
    order = expert_order(ids, weights, experts, first, plan.rows)
    gated = torch.empty(rows * topk, width, dtype=x.dtype, device=x.device)
    _gated(own, inner, order, topk, plan, gated)
    each = torch.empty(rows * topk, outer.rows, dtype=torch.float32, device=x.device)
    own = activation(gated, outer, act)
    _outer(own, outer, order, moe_tiling(rows, topk, experts, outer.rows, units, own.grouped), each)
    combine(each, weights, ids, out, first, experts)
    return out


def _gated(
    x: Activation, w: WeightArgs, order: ExpertOrder, topk: int, plan: MoETiling, out: Tensor
) -> None:
    """Fills the rows of ``out`` [T topk, I] of choices in ``order``."""
    width = out.shape[1]
    gated_kernel[(triton.cdiv(width, plan.columns), order.tiles.shape[0])](
        x.data, x.scale, w.data, w.scale, w.row_scale, order.order, order.tiles, out, width,
        w.columns, topk, x.stride, x.scale_stride, w.scale_size,
        BN=plan.columns, BM=order.rows, FORMAT=w.format, ACT=x.kind, WIDE=x.wide, CODES=x.codes,
        STEP=plan.step, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def _outer(x: Activation, w: WeightArgs, order: ExpertOrder, plan: MoETiling, out: Tensor) -> None:
    """Fills the rows of ``out`` fp32 [T topk, H] of choices in ``order``; x has these rows too."""
    outer_kernel[(triton.cdiv(w.rows, plan.columns), order.tiles.shape[0])](
        x.data, x.scale, w.data, w.scale, w.row_scale, order.order, order.tiles, out, w.rows,
        w.columns, x.stride, x.scale_stride, w.scale_size,
        BN=plan.columns, BM=order.rows, FORMAT=w.format, ACT=x.kind, WIDE=x.wide, CODES=x.codes,
        STEP=plan.step, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
