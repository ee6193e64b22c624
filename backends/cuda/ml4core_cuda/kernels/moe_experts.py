"""``moe_experts``: the weighted sum of routed experts, SwiGLU each.

Rate model (H200: 4.25 TB/s; 128 experts of 6,144 x 6,144 in ``fp8_block``, 113 MB each, top-4):

- 1 row: 4 experts, 453 MB, 107 us; two launches (``moe_row``), the second adds the experts up.
  Up to 4 rows of FP4 take the same way; see ``moe_fp4`` for these and for more.
- 8 rows: about 28 experts touched, 3.2 GB, 0.75 ms; 64 rows: about 111, 12.6 GB, 3.0 ms. An
  expert's rows share a tile, so each touched expert is read once.
- 4,096 rows: 3.7 TFLOP, 5.0 ms in bf16 and 3.0 ms with e4m3 activations, against 3.4 ms of bytes.

Four launches: the order of choices, w13 with the gate in its epilogue, w2 into fp32, and the sum
over choices, in their order, cast once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import Weight
from ml4core_cuda.kernels import many_experts, moe_fp4
from ml4core_cuda.kernels.activations import Activation, activation
from ml4core_cuda.kernels.expert_matrix import expert_matrix
from ml4core_cuda.kernels.moe_row import rows_apart
from ml4core_cuda.kernels.products import CODES_BY_ROW, KIND_NAMES, stages_within, tile_sum
from ml4core_cuda.kernels.target import arch_of, device_name
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels.expert_order import ExpertOrder, expert_order
from ml4core_triton.kernels.numeric import narrow, next_power
from ml4core_triton.kernels.silu_mul import silu
from ml4core_triton.kernels.sums import combine
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import (
    FORMAT_NAMES,
    K_TILE,
    WeightArgs,
    check_experts,
    is_fp4,
    weight_args,
    whole_scale,
)

_BY_ROW = tl.constexpr(CODES_BY_ROW)
_FP4_ROWS_APART = 4


@dataclass(frozen=True)
class MoETiling:
    """Columns of an expert's result and rows of its tile a program."""

    columns: int
    rows: int
    warps: int
    stages: int


def moe_tiling(
    rows: int,
    topk: int,
    experts: int,
    columns: int,
    multiprocessors: int,
    fp4: bool,
    arch: str = "sm_90",
) -> MoETiling:
    """The choice for these sizes. A tile holds twice the mean of an expert's rows, where it can."""
    choices = rows * topk
    many = min(64, max(16, next_power(2 * -(-choices // experts))))
    many = min(many, max(16, next_power(choices)))
    tiles = min(choices, experts + choices // many)
    # 8,192 results a program of 8 warps: gate and up then stay in registers beside the operands.
    each = 128 if fp4 or (many == 64 and arch == "sm_90") else 64
    while each > 32 and tiles * -(-columns // each) < 2 * multiprocessors:
        each //= 2
    return MoETiling(each, many, 8 if each == 128 else 4, 3 if many == 64 else 4)


def shape_key(format: str, rows: int, columns: int, inner: int, act: str) -> str:
    """The shape by which sizes are measured."""
    return f"{format} {columns}x{inner}, {next_power(rows)} rows of {act}"


@triton.jit
def _gated_kernel(
    x, x_scale, data, scale, row_scale, shared, shared_scale, shared_row_scale, order, tiles, out,
    W, K, E, topk, x_row, scale_row, scale_size,
    BN: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, SHARED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """silu(w1 x) * (w3 x) at the choice's row of out [T topk, W]: grid (tiles of W, tiles).

    ``ALIGNED``: W is a multiple of BN, so that rows of w3 begin where a tile does.
    """
    tile = tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count > 0:
        expert = tl.load(tile).to(tl.int64)
        place = tl.arange(0, BM)
        fits = place < count
        choice = tl.load(order + tl.load(tile + 1) + place, mask=fits, other=0)
        token = (choice // topk).to(tl.int64)
        rows = tl.program_id(0) * BN + tl.arange(0, BN)
        row_fits = rows < W
        data, scale, row_scale = expert_matrix(
            data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, 2 * W, K,
            scale_size, FORMAT, SHARED,
        )  # fmt: skip
        gate = tile_sum(
            x, token * x_row, fits, x_scale, token * scale_row, data, scale, rows, row_fits, 0, K,
            K, BN, BM, FORMAT, ACT, WIDE, True, EVEN,
        )  # fmt: skip
        up = tile_sum(
            x, token * x_row, fits, x_scale, token * scale_row, data, scale, rows + W, row_fits, 0,
            K, K, BN, BM, FORMAT, ACT, WIDE, ALIGNED, EVEN,
        )  # fmt: skip
        gate = gate * whole_scale(scale, row_scale, rows, row_fits, FORMAT, BN)[:, None]
        up = up * whole_scale(scale, row_scale, rows + W, row_fits, FORMAT, BN)[:, None]
        if ACT == _BY_ROW:
            of_row = tl.load(x_scale + token, mask=fits, other=0.0)[None, :]
            gate, up = gate * of_row, up * of_row
        where = out + choice.to(tl.int64)[None, :] * W + rows[:, None]
        inner = narrow(silu(gate) * up, out.dtype.element_ty)
        tl.store(where, inner, mask=row_fits[:, None] & fits[None, :])


@triton.jit
def _outer_kernel(
    x, x_scale, data, scale, row_scale, shared, shared_scale, shared_row_scale, order, tiles, out,
    H, K, E, x_row, scale_row, scale_size,
    BN: tl.constexpr, BM: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
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
        data, scale, row_scale = expert_matrix(
            data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, H, K,
            scale_size, FORMAT, SHARED,
        )  # fmt: skip
        found = tile_sum(
            x, choice * x_row, fits, x_scale, choice * scale_row, data, scale, rows, row_fits, 0, K,
            K, BN, BM, FORMAT, ACT, WIDE, True, EVEN,
        )  # fmt: skip
        of_matrix = whole_scale(scale, row_scale, rows, row_fits, FORMAT, BN)
        found = found * of_matrix[:, None]
        if ACT == _BY_ROW:
            found = found * tl.load(x_scale + choice, mask=fits, other=0.0)[None, :]
        where = out + choice[None, :] * H + rows[:, None]
        tl.store(where, found, mask=row_fits[:, None] & fits[None, :])


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

    ``act`` quantises the input of both products, as in ``gemm``. ``ValueError`` for shapes that
    don't belong together.
    """
    inner, outer = weight_args(w13), weight_args(w2)
    check_experts(x, inner, outer, weights, ids)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    first = first_expert or 0
    weights, ids = weights.contiguous(), ids.contiguous()
    if taken_apart(x, inner, act):
        rows_apart(x.contiguous(), inner, outer, None, weights, ids, first, out)
        return out
    each = each_choice(x, inner, outer, None, weights, ids, first, act)
    combine(each, weights, ids, out, first, inner.matrices)
    return out


def taken_apart(x: Tensor, w: WeightArgs, act: str | None) -> bool:
    """Whether ``moe_row`` serves: one row as it is, or so few that each has experts of its own.

    Of FP4 only, up to where the experts that two rows share cost more than the order of all.
    """
    return x.shape[0] <= (_FP4_ROWS_APART if is_fp4(w.format) else 1) and act is None


def each_choice(
    x: Tensor,
    w13: WeightArgs,
    w2: WeightArgs,
    shared: tuple[WeightArgs, WeightArgs] | None,
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
    act: str | None,
) -> Tensor:
    """What each choice's expert makes of its row, fp32 [T topk, H]; rows of choices that add
    nothing are not written. With ``shared`` (its w13 and w2), id E is that expert.
    """
    rows, topk = ids.shape
    experts = w13.matrices + (shared is not None)
    if act is None and moe_fp4.serves(x, w13, w2) and moe_fp4.together(rows, topk, experts):
        return moe_fp4.each_choice(x, w13, w2, shared, weights, ids, first_expert)
    inner, units, arch = w2.columns, units_of(x.device), arch_of(x.device)

    def sizes(part: str, w: WeightArgs, columns: int, one: Activation) -> MoETiling:
        default = moe_tiling(rows, topk, experts, columns, units, is_fp4(w.format), arch)
        if many_experts.serves(one.kind, w, columns, rows * topk, experts):
            default = MoETiling(128, 128, 8, 3)
        act = KIND_NAMES[one.kind]
        shape = shape_key(FORMAT_NAMES[w.format], rows, columns, w.columns, act)
        return sizes_for(f"moe_{part}", device_name(x.device), shape, default)

    given = activation(x, w13, act)
    plan = sizes("gated", w13, inner, given)
    order = expert_order(ids, weights, experts, first_expert, plan.rows)
    gated = torch.empty(rows * topk, inner, dtype=x.dtype, device=x.device)
    gated_product(given, w13, shared and shared[0], order, topk, plan, gated)
    each = torch.empty(rows * topk, w2.rows, dtype=torch.float32, device=x.device)
    given = activation(gated, w2, act)
    plan = sizes("outer", w2, w2.rows, given)
    outer_product(given, w2, shared and shared[1], order, plan, each)
    return each


def gated_product(
    x: Activation,
    w13: WeightArgs,
    shared: WeightArgs | None,
    order: ExpertOrder,
    topk: int,
    plan: MoETiling,
    out: Tensor,
) -> None:
    """Fills the rows of ``out`` [T topk, I] of choices in ``order``."""
    width, other = out.shape[1], shared or w13
    if many_experts.serves(x.kind, w13, width, out.shape[0], w13.matrices + (shared is not None)):
        many_experts.gated_product(
            x, w13, shared, order, topk, plan.columns, plan.warps, plan.stages, out
        )
        return
    _gated_kernel[(triton.cdiv(width, plan.columns), order.tiles.shape[0])](
        x.data, x.scale, w13.data, w13.scale, w13.row_scale, other.data, other.scale,
        other.row_scale, order.order, order.tiles, out, width, w13.columns, w13.matrices, topk,
        x.stride, x.scale_stride, w13.scale_size,
        BN=plan.columns, BM=order.rows, FORMAT=w13.format, ACT=x.kind, WIDE=x.meets(w13),
        SHARED=shared is not None, ALIGNED=width % plan.columns == 0,
        EVEN=w13.columns % K_TILE == 0, num_warps=plan.warps,
        num_stages=stages_within(plan.stages, plan.columns, order.rows, w13.data, x.data),
    )  # fmt: skip


def outer_product(
    x: Activation,
    w2: WeightArgs,
    shared: WeightArgs | None,
    order: ExpertOrder,
    plan: MoETiling,
    out: Tensor,
) -> None:
    """Fills the rows of ``out`` fp32 [T topk, H] of choices in ``order``; x has these rows too."""
    other = shared or w2
    if many_experts.serves(x.kind, w2, w2.rows, out.shape[0], w2.matrices + (shared is not None)):
        many_experts.outer_product(x, w2, shared, order, plan.columns, plan.warps, plan.stages, out)
        return
    _outer_kernel[(triton.cdiv(w2.rows, plan.columns), order.tiles.shape[0])](
        x.data, x.scale, w2.data, w2.scale, w2.row_scale, other.data, other.scale, other.row_scale,
        order.order, order.tiles, out, w2.rows, w2.columns, w2.matrices, x.stride, x.scale_stride,
        w2.scale_size,
        BN=plan.columns, BM=order.rows, FORMAT=w2.format, ACT=x.kind, WIDE=x.meets(w2),
        SHARED=shared is not None, EVEN=w2.columns % K_TILE == 0, num_warps=plan.warps,
        num_stages=stages_within(plan.stages, plan.columns, order.rows, w2.data, x.data),
    )  # fmt: skip
