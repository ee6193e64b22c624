"""Routed experts in FP4 for so few rows that an expert has 8 at most: by ``fp4_rows``.

Either each row by itself, in the two launches of ``moe_row``; or the rows of an expert together, so
that its weights are read once, in the launches of ``moe_experts``, by ``fp4_experts`` where it has
them. What the first product gives is
written where the second one's matrix units want it.

Rate model of an H200, 128 experts of 6,144 x 6,144, top-4, in ``nvfp4`` (63.7 MB each, 4.25 TB/s):
1 row 60 us of bytes and 47 us of instructions; 8 rows, 28 experts, 430 us and 330 us; 64 rows, 111
experts, 1.63 ms and 1.3 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core_cuda.kernels.expert_matrix import expert_matrix
from ml4core_cuda.kernels.fp4_rows import ROWS, place_of, row_sums
from ml4core_cuda.kernels.fp4_shapes import turns_fit
from ml4core_cuda.kernels.prefetch import prefetch_rows
from ml4core_cuda.kernels.target import device_name
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.expert_order import expert_order
from ml4core_triton.kernels.numeric import narrow
from ml4core_triton.kernels.silu_mul import silu
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import FORMAT_NAMES, K_TILE, NVFP4, WeightArgs, is_fp4

_NVFP4, _ROWS = tl.constexpr(NVFP4), tl.constexpr(ROWS)
_MEAN = 4
"""Rows of an expert, on average, up to which hardly one has more than 8."""


@dataclass(frozen=True)
class CodesTiling:
    """How a product is cut.

    Attributes:
        columns: rows of the weight a program; a multiple of 16, of w1 and w3 together.
        chunks: 128 columns of the weight that a warp takes a turn.
        registers: of a thread at most, so that more programs find room; 0 leaves it open.
    """

    columns: int
    chunks: int
    warps: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        bound = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, **bound}


def codes_tiling(rows: int, inner: int, matrices: int, multiprocessors: int) -> CodesTiling:
    """The default for ``matrices`` of [rows, inner]: four programs a multiprocessor of them, if
    they can be, and then 16 warps, as a turn's bytes are all that a warp has on its way; 16 rows of
    8 warps three times, which needs the bound.
    """
    each = 32 if matrices * -(-rows // 32) >= 4 * multiprocessors else 16
    programs, warps = matrices * -(-rows // each), 4
    while warps < 16 and programs * warps < 16 * multiprocessors and inner >= 2 * warps * K_TILE:
        warps *= 2
    return CodesTiling(each, 1, warps, 80 if (each, warps) == (16, 8) else 0)


def shape_key(format: str, part: str, columns: int, inner: int, rows: int, topk: int) -> str:
    """The shape by which sizes are measured; ``part`` is gated or outer, ``rows`` those that go
    together, 1 where each goes by itself.
    """
    return f"{format} {part} {columns}x{inner}, {rows} rows of {topk}"


def serves(x: Tensor, w13: WeightArgs, w2: WeightArgs) -> bool:
    """Whether these kernels take such operands: whole blocks, and matrices of less than 2 GiB."""
    both = (w13, w2)
    fits = all(w.columns % K_TILE == 0 and w.rows * w.columns < 1 << 32 for w in both)
    return x.dtype == torch.bfloat16 and fits and all(is_fp4(w.format) for w in both)


def together(rows: int, topk: int, experts: int) -> bool:
    """Whether an expert has 8 rows at most, but for a few."""
    return rows * topk <= _MEAN * experts


@triton.jit
def _row_scales(row_scale, rows, FORMAT: tl.constexpr):
    """What sums of rows are multiplied by, fp32."""
    return tl.load(row_scale + rows) if FORMAT == _NVFP4 else tl.full(rows.shape, 1.0, tl.float32)


@triton.jit
def _gated(
    x, x_rows, data, scale, row_scale, out, out_rows, fits, W, K,
    R: tl.constexpr, C: tl.constexpr, WARPS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Stores silu(w1 x) * (w3 x) of up to 8 rows at ``out_rows`` [8] of out, where they fit."""
    # Eight rows of w1 and eight of w3 in turn: a thread has the sums of both.
    group, one = tl.arange(0, R), tl.arange(0, 8)
    start = tl.program_id(0) * (4 * R)
    row = start + (group // 2 * 8)[None, :] + one[:, None]
    rows = tl.minimum(row, W - 1) + (group % 2)[None, :] * W
    found = tl.sum(row_sums(x, x_rows, data, scale, rows, K, WARPS, C, FORMAT, False), axis=0)
    pairs = tl.permute(tl.reshape(found, (R // 2, 2, 8, _ROWS)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    row = start + (tl.arange(0, R // 2) * 8)[:, None] + one[None, :]
    kept = tl.minimum(row, W - 1)
    gate = gate * _row_scales(row_scale, kept, FORMAT)[:, :, None]
    up = up * _row_scales(row_scale, kept + W, FORMAT)[:, :, None]
    where = out + out_rows[None, None, :] + place_of(row)[:, :, None]
    mask = (row < W)[:, :, None] & fits[None, None, :]
    tl.store(where, narrow(silu(gate) * up, out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_row_kernel(
    x, data, scale, row_scale, shared, shared_scale, shared_row_scale, weights, ids, out, W, K,
    scale_size, first_expert, E,
    R: tl.constexpr, C: tl.constexpr, WARPS: tl.constexpr, FORMAT: tl.constexpr,
    SHARED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out [T, topk, W], placed, of each choice: grid (tiles of W, topk, T)."""
    choice, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = token * tl.num_programs(1) + choice
    let_next_begin(DEPENDENT)
    if SHARED and choice == tl.num_programs(1) - 1:
        index = tl.arange(0, 8 * R)
        row = tl.program_id(0) * (4 * R) + index // 2
        prefetch_rows(shared, row + index % 2 * W, row < W, K // 2, 1, DEPENDENT)
    wait_for_previous(DEPENDENT)
    expert = tl.load(ids + at) - first_expert
    if (expert >= 0) & (expert < E + SHARED) & (tl.load(weights + at) != 0):
        data, scale, row_scale = expert_matrix(
            data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, 2 * W, K,
            scale_size, FORMAT, SHARED,
        )  # fmt: skip
        place = tl.arange(0, _ROWS)
        _gated(
            x + token * K, place * 0, data, scale, row_scale, out + at * W, place * 0, place == 0,
            W, K, R, C, WARPS, FORMAT,
        )  # fmt: skip


@triton.jit
def _outer_row_kernel(
    x, data, scale, row_scale, shared, shared_scale, shared_row_scale, weights, ids, out, H, K,
    scale_size, first_expert, E,
    TOPK: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WARPS: tl.constexpr,
    FORMAT: tl.constexpr, SHARED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weighted sum of w2 times x [T, topk, K], placed, out [T, H]: grid (tiles of H, T)."""
    token = tl.program_id(1).to(tl.int64)
    index = tl.arange(0, 8 * R)
    row = tl.program_id(0) * (8 * R) + index
    kept = tl.minimum(row, H - 1)
    start = tl.program_id(0) * (8 * R) + (tl.arange(0, R) * 8)[None, :]
    rows = tl.minimum(start + tl.arange(0, 8)[:, None], H - 1)
    let_next_begin(DEPENDENT)
    if SHARED:
        prefetch_rows(shared, row, row < H, K // 2, 1, DEPENDENT)
    wait_for_previous(DEPENDENT)
    total = tl.zeros([WARPS, 8 * R, _ROWS], tl.float32)
    for choice in range(TOPK):
        at = token * TOPK + choice
        expert = tl.load(ids + at) - first_expert
        weight = tl.load(weights + at)
        if (expert >= 0) & (expert < E + SHARED) & (weight != 0):
            matrix, scales, row_scales = expert_matrix(
                data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, H, K,
                scale_size, FORMAT, SHARED,
            )  # fmt: skip
            same = tl.arange(0, _ROWS) * 0
            found = row_sums(x + at * K, same, matrix, scales, rows, K, WARPS, C, FORMAT, True)
            factor = _row_scales(row_scales, kept, FORMAT) * weight
            total += found * factor[None, :, None]
    # All columns hold the same.
    first = tl.where((tl.arange(0, _ROWS) == 0)[None, :], tl.sum(total, axis=0), 0.0)
    found = narrow(tl.sum(first, axis=1), out.dtype.element_ty)
    tl.store(out + token * H + row, found, mask=row < H)


@triton.jit
def _gated_tile_kernel(
    x, data, scale, row_scale, shared, shared_scale, shared_row_scale, order, tiles, out, W, K, E,
    topk, x_row, scale_size,
    R: tl.constexpr, C: tl.constexpr, WARPS: tl.constexpr, FORMAT: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """The choice's row of out [T topk, W], placed: grid (tiles of W, tiles)."""
    tile = tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count > 0:
        place = tl.arange(0, _ROWS)
        choice = tl.load(order + tl.load(tile + 1) + tl.minimum(place, count - 1)).to(tl.int64)
        data, scale, row_scale = expert_matrix(
            data, scale, row_scale, shared, shared_scale, shared_row_scale, tl.load(tile), E, 2 * W,
            K, scale_size, FORMAT, SHARED,
        )  # fmt: skip
        _gated(
            x, choice // topk * x_row, data, scale, row_scale, out, choice * W, place < count, W, K,
            R, C, WARPS, FORMAT,
        )  # fmt: skip


@triton.jit
def _outer_tile_kernel(
    x, data, scale, row_scale, shared, shared_scale, shared_row_scale, order, tiles, out, H, K, E,
    scale_size,
    R: tl.constexpr, C: tl.constexpr, WARPS: tl.constexpr, FORMAT: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """w2 times x [T topk, K], placed, at the choice's row of out fp32 [T topk, H]: grid (tiles of
    H, tiles).
    """
    tile = tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count > 0:
        place = tl.arange(0, _ROWS)
        choice = tl.load(order + tl.load(tile + 1) + tl.minimum(place, count - 1)).to(tl.int64)
        data, scale, row_scale = expert_matrix(
            data, scale, row_scale, shared, shared_scale, shared_row_scale, tl.load(tile), E, H, K,
            scale_size, FORMAT, SHARED,
        )  # fmt: skip
        start = tl.program_id(0) * (8 * R)
        rows = start + (tl.arange(0, R) * 8)[None, :] + tl.arange(0, 8)[:, None]
        rows = tl.minimum(rows, H - 1)
        found = row_sums(x, choice * K, data, scale, rows, K, WARPS, C, FORMAT, True)
        row = start + tl.arange(0, 8 * R)
        factor = _row_scales(row_scale, tl.minimum(row, H - 1), FORMAT)
        found = tl.sum(found, axis=0) * factor[:, None]
        mask = (row < H)[:, None] & (place < count)[None, :]
        tl.store(out + choice[None, :] * H + row[:, None], found, mask=mask)


def _plan(part: str, w: WeightArgs, rows: int, matrices: int, topk: int, x: Tensor) -> CodesTiling:
    default = codes_tiling(w.rows, w.columns, matrices, units_of(x.device))
    columns = w.rows // 2 if part == "gated" else w.rows
    shape = shape_key(FORMAT_NAMES[w.format], part, columns, w.columns, rows, topk)
    return sizes_for("moe_fp4", device_name(x.device), shape, default)


def parts(w: WeightArgs, shared: WeightArgs | None) -> tuple[Tensor, ...]:
    """Codes, scales and row scales of the routed experts, and of the shared one if there is one."""
    other = shared or w
    return w.data, w.scale, w.row_scale, other.data, other.scale, other.row_scale


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
    """As ``moe_row.rows_apart``."""
    rows, topk = ids.shape
    width, other = w2.columns, shared or (None, None)
    inner = x.new_empty(rows, topk, width)
    plan = _plan("gated", w13, 1, topk, topk, x)
    _gated_row_kernel[(triton.cdiv(2 * width, plan.columns), topk, rows)](
        x, *parts(w13, other[0]), weights, ids, inner, width, w13.columns, w13.scale_size,
        first_expert, w13.matrices,
        R=plan.columns // 8, C=plan.chunks, WARPS=plan.warps, FORMAT=w13.format,
        SHARED=int(shared is not None), DEPENDENT=ahead, **plan.options, **dependent(ahead),
    )  # fmt: skip
    plan = _plan("outer", w2, 1, 1, topk, x)
    _outer_row_kernel[(triton.cdiv(w2.rows, plan.columns), rows)](
        inner, *parts(w2, other[1]), weights, ids, out, w2.rows, w2.columns, w2.scale_size,
        first_expert, w2.matrices,
        TOPK=topk, R=plan.columns // 8, C=plan.chunks, WARPS=plan.warps, FORMAT=w2.format,
        SHARED=int(shared is not None), DEPENDENT=ahead, **plan.options, **dependent(ahead),
    )  # fmt: skip


def each_choice(
    x: Tensor,
    w13: WeightArgs,
    w2: WeightArgs,
    shared: tuple[WeightArgs, WeightArgs] | None,
    weights: Tensor,
    ids: Tensor,
    first_expert: int,
) -> Tensor:
    """As ``moe_experts.each_choice``."""
    if turns_fit(w13, w2):
        from ml4core_cuda.kernels import fp4_experts

        return fp4_experts.each_choice(x, w13, w2, shared, weights, ids, first_expert)
    rows, topk = ids.shape
    experts = w13.matrices + (shared is not None)
    width, other = w2.columns, shared or (None, None)
    order = expert_order(ids, weights, experts, first_expert, ROWS)
    tiles = order.tiles.shape[0]
    inner = torch.empty(rows * topk, width, dtype=x.dtype, device=x.device)
    plan = _plan("gated", w13, ROWS, tiles, topk, x)
    _gated_tile_kernel[(triton.cdiv(2 * width, plan.columns), tiles)](
        x, *parts(w13, other[0]), order.order, order.tiles, inner, width, w13.columns,
        w13.matrices, topk, x.stride(0), w13.scale_size,
        R=plan.columns // 8, C=plan.chunks, WARPS=plan.warps, FORMAT=w13.format,
        SHARED=shared is not None, **plan.options,
    )  # fmt: skip
    each = torch.empty(rows * topk, w2.rows, dtype=torch.float32, device=x.device)
    plan = _plan("outer", w2, ROWS, tiles, topk, x)
    _outer_tile_kernel[(triton.cdiv(w2.rows, plan.columns), tiles)](
        inner, *parts(w2, other[1]), order.order, order.tiles, each, w2.rows, w2.columns,
        w2.matrices, w2.scale_size,
        R=plan.columns // 8, C=plan.chunks, WARPS=plan.warps, FORMAT=w2.format,
        SHARED=shared is not None, **plan.options,
    )  # fmt: skip
    return each
