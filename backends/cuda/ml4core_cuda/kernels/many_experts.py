"""Experts of many rows each, on e4m3 codes by block: the products of ``many_rows`` on rows in the
order of experts.

The first product's two tiles are of w1 and of w3, so that the gate is in its epilogue. An expert's
last rows, if half a tile has them, take half its work there: of 16,384 choices among 128 experts
every second expert has some beyond its first 128. In the second product that costs more than it
gives, as its registers spill then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ml4core_cuda.kernels.activations import Activation
from ml4core_cuda.kernels.expert_matrix import expert_matrix
from ml4core_cuda.kernels.many_rows import two_sums
from ml4core_cuda.kernels.products import CODES_BY_BLOCK
from ml4core_triton.kernels.expert_order import ExpertOrder
from ml4core_triton.kernels.numeric import narrow
from ml4core_triton.kernels.silu_mul import silu
from ml4core_triton.kernels.weights import FP8_BLOCK, K_TILE, WeightArgs

LEAST = 32
"""Rows of an expert, on average, from which on this is worth it."""
_FP8_BLOCK = tl.constexpr(FP8_BLOCK)


def serves(kind: int, w: WeightArgs, columns: int, rows: int, experts: int) -> bool:
    """Whether a product is for this: of so many rows on so many experts, to ``columns``."""
    whole = w.columns % K_TILE == 0 and columns % K_TILE == 0
    many = rows >= LEAST * experts
    return kind == CODES_BY_BLOCK and w.format == FP8_BLOCK and whole and many


@triton.jit
def _gated(
    x, x_scale, data, scale, order, tile, out, W, K, topk, x_row, scale_row,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """silu(w1 x) * (w3 x) of up to BM choices of a tile."""
    place = tl.arange(0, BM)
    # Places that aren't there are the last one again.
    kept = tl.minimum(place, tl.load(tile + 2) - 1)
    token = (tl.load(order + tl.load(tile + 1) + kept) // topk).to(tl.int64)
    start = tl.program_id(0) * BN
    gate, up = two_sums(
        x, token * x_row, x_scale, token * scale_row, data, scale, start, W + start, K, BM, BN,
        STAGES,
    )  # fmt: skip
    # Again, as registers are short above.
    choice = tl.load(order + tl.load(tile + 1) + kept).to(tl.int64)
    column = start + tl.arange(0, BN)
    where = out + choice[:, None] * W + column[None, :]
    inner = narrow(silu(gate) * up, out.dtype.element_ty)
    tl.store(where, inner, mask=(place < tl.load(tile + 2))[:, None])


@triton.jit
def _gated_kernel(
    x, x_scale, data, scale, shared, shared_scale, order, tiles, out,
    W, K, E, topk, x_row, scale_row, scale_size,
    BM: tl.constexpr, BN: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """silu(w1 x) * (w3 x) at the choice's row of out [T topk, W]: grid (tiles of W, tiles)."""
    tile = tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count > 0:
        data, scale, _ = expert_matrix(
            data, scale, scale, shared, shared_scale, shared_scale, tl.load(tile).to(tl.int64), E,
            2 * W, K, scale_size, _FP8_BLOCK, SHARED,
        )  # fmt: skip
        if count > BM // 2:
            _gated(
                x, x_scale, data, scale, order, tile, out, W, K, topk, x_row, scale_row,
                BM, BN, STAGES,
            )  # fmt: skip
        else:
            _gated(
                x, x_scale, data, scale, order, tile, out, W, K, topk, x_row, scale_row,
                BM // 2, BN, STAGES,
            )  # fmt: skip


@triton.jit
def _outer_kernel(
    x, x_scale, data, scale, shared, shared_scale, order, tiles, out,
    H, K, E, x_row, scale_row, scale_size,
    BM: tl.constexpr, BN: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """w2 times inner rows at the choice's row of out fp32 [T topk, H]: grid (pairs of tiles of H,
    tiles).
    """
    tile = tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count > 0:
        expert = tl.load(tile).to(tl.int64)
        place = tl.arange(0, BM)
        kept = tl.minimum(place, count - 1)
        row = tl.load(order + tl.load(tile + 1) + kept)
        data, scale, _ = expert_matrix(
            data, scale, scale, shared, shared_scale, shared_scale, expert, E, H, K, scale_size,
            _FP8_BLOCK, SHARED,
        )  # fmt: skip
        start = tl.program_id(0) * 2 * BN
        second = start + BN
        if second >= H:
            second = start
        acc, more = two_sums(
            x, row.to(tl.int64) * x_row, x_scale, row.to(tl.int64) * scale_row, data, scale, start,
            second, K, BM, BN, STAGES,
        )  # fmt: skip
        choice = tl.load(order + tl.load(tile + 1) + kept).to(tl.int64)
        column = start + tl.arange(0, BN)
        where = out + choice[:, None] * H + column[None, :]
        fits = (place < count)[:, None]
        tl.store(where, acc, mask=fits)
        if start + BN < H:
            tl.store(where + BN, more, mask=fits)


def gated_product(
    x: Activation, w13: WeightArgs, shared: WeightArgs | None, order: ExpertOrder, topk: int,
    columns: int, warps: int, stages: int, out: Tensor,
) -> None:  # fmt: skip
    """Fills the rows of ``out`` [T topk, I] of choices in ``order``."""
    width, other = out.shape[1], shared or w13
    _gated_kernel[(triton.cdiv(width, columns), order.tiles.shape[0])](
        x.data, x.scale, w13.data, w13.scale, other.data, other.scale, order.order, order.tiles,
        out, width, w13.columns, w13.matrices, topk, x.stride, x.scale_stride, w13.scale_size,
        BM=order.rows, BN=columns, SHARED=shared is not None, STAGES=stages, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def outer_product(
    x: Activation, w2: WeightArgs, shared: WeightArgs | None, order: ExpertOrder, columns: int,
    warps: int, stages: int, out: Tensor,
) -> None:  # fmt: skip
    """Fills the rows of ``out`` fp32 [T topk, H] of choices in ``order``; x has these rows too."""
    other = shared or w2
    _outer_kernel[(triton.cdiv(w2.rows, 2 * columns), order.tiles.shape[0])](
        x.data, x.scale, w2.data, w2.scale, other.data, other.scale, order.order, order.tiles, out,
        w2.rows, w2.columns, w2.matrices, x.stride, x.scale_stride, w2.scale_size,
        BM=order.rows, BN=columns, SHARED=shared is not None, STAGES=stages, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
