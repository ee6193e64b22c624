"""Routed experts in FP4 for so few rows that an expert has 8 at most, in Gluon, by ``fp4_turns``:
``moe_fp4.each_choice`` where this triton has the language.

Rate model of an H200, 128 experts of 6,144 x 6,144 in ``mxfp4`` (60.2 MB each, 4.25 TB/s), top-4: 8
rows, 28 experts, 400 us of bytes and 330 us of instructions; 64 rows, 111 experts, 1.57 ms and 1.32
ms. They take 495 us and 2.0 ms.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ml4core_cuda.kernels import expert_matrix
from ml4core_cuda.kernels.fp4_rows import ROWS
from ml4core_cuda.kernels.fp4_shapes import TurnsTiling
from ml4core_cuda.kernels.fp4_turns import place_of, row_sums
from ml4core_cuda.kernels.fp4_units import wide
from ml4core_cuda.kernels.moe_fp4 import parts, shape_key
from ml4core_cuda.kernels.target import device_name
from ml4core_cuda.tuned import sizes_for
from ml4core_triton.kernels import silu_mul
from ml4core_triton.kernels.expert_order import expert_order
from ml4core_triton.kernels.weights import FORMAT_NAMES, NVFP4, WeightArgs

_NVFP4 = gl.constexpr(NVFP4)
_expert_matrix = gluon.jit(expert_matrix.expert_matrix.fn)
_silu = gluon.jit(silu_mul.silu.fn)


@gluon.jit
def _matrix(
    data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, N, scale_size,
    K: gl.constexpr, FORMAT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """An expert's codes and scales, as words, and its row scales."""
    data, scale, row_scale = _expert_matrix(
        data, scale, row_scale, shared, shared_scale, shared_row_scale, expert, E, N, K,
        scale_size, FORMAT, SHARED,
    )  # fmt: skip
    words = data.to(gl.pointer_type(gl.int32)), scale.to(gl.pointer_type(gl.int32))
    return words[0], words[1], row_scale


@gluon.jit
def _thread(WARPS: gl.constexpr):
    return gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, wide(WARPS, 16)))


@gluon.jit
def _activation(x, offset, WARPS: gl.constexpr):
    """Words of a row of bf16 ``x`` for every thread; ``offset`` in elements."""
    return (x + offset).to(gl.pointer_type(gl.int32)) + _thread(WARPS) * 0


@gluon.jit
def _row_scale(row_scale, row, FORMAT: gl.constexpr):
    return gl.load(row_scale + row) if FORMAT == _NVFP4 else 1.0


@gluon.jit
def _row(value, first):
    """The rows of a tile, down its first axis."""
    index = gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
    return gl.expand_dims(first + index, 1)


@gluon.jit
def _one(value):
    """The 8 activations, along the second axis of a tile."""
    return gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, value.type.layout)), 0)


@gluon.jit
def _activated(found, row_scale, first, limit, FORMAT: gl.constexpr):
    """silu(w1 x) * (w3 x) of 8 rows of each, fp32 [8, 8]."""
    gate, up = gl.split(gl.permute(found, (0, 1, 3, 2)))
    gate, up = gl.reshape(gate, (8, 8)), gl.reshape(up, (8, 8))
    kept = gl.minimum(_row(gate, first), limit - 1)
    gate = gate * _row_scale(row_scale, kept, FORMAT)
    up = up * _row_scale(row_scale, kept + limit, FORMAT)
    return _silu(gate) * up


@gluon.jit
def _plain(found):
    """16 rows of a product, fp32 [16, 8]."""
    return gl.reshape(gl.permute(found, (2, 0, 1, 3)), (16, 8))


@gluon.jit
def gated_tile_kernel(
    x, data, scale, row_scale, shared, shared_scale, shared_row_scale, order, tiles, out, W, E,
    topk, x_row, scale_size,
    K: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr,
    STAGES: gl.constexpr, FORMAT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """silu(w1 x) * (w3 x) at the choice's row of out [T topk, W], placed: grid (tiles of W,
    tiles).
    """
    tile = tiles + gl.program_id(1) * 3
    count = gl.load(tile + 2)
    E = gl.to_tensor(E)
    if count > 0:
        order += gl.load(tile + 1)
        codes, scales, row_scales = _matrix(
            data, scale, row_scale, shared, shared_scale, shared_row_scale, gl.load(tile), E, 2 * W,
            scale_size, K, FORMAT, SHARED,
        )  # fmt: skip
        own = gl.minimum(_thread(WARPS) % 32 // 4, count - 1)
        token = gl.load(order + own).to(gl.int64) // topk
        first = gl.program_id(0) * (4 * R)
        found = row_sums(
            _activation(x, token * x_row, WARPS), codes, scales, first, W,
            K, R, WARPS, C, STAGES, FORMAT, True, False,
        )  # fmt: skip
        for pair in gl.static_range(R // 2):
            value = _activated(found[pair], row_scales, first + pair * 8, W, FORMAT)
            row, one = _row(value, first + pair * 8), _one(value)
            choice = gl.load(order + gl.minimum(one, count - 1)).to(gl.int64)
            where = out + choice * W + place_of(row)
            gl.store(where, value.to(out.dtype.element_ty), mask=(row < W) & (one < count))


@gluon.jit
def outer_tile_kernel(
    x, data, scale, row_scale, shared, shared_scale, shared_row_scale, order, tiles, out, H, E,
    scale_size,
    K: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr, C: gl.constexpr,
    STAGES: gl.constexpr, FORMAT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """w2 times x [T topk, K], placed, at the choice's row of out fp32 [T topk, H]: grid (tiles of
    H, tiles).
    """
    tile = tiles + gl.program_id(1) * 3
    count = gl.load(tile + 2)
    E = gl.to_tensor(E)
    if count > 0:
        order += gl.load(tile + 1)
        codes, scales, row_scales = _matrix(
            data, scale, row_scale, shared, shared_scale, shared_row_scale, gl.load(tile), E, H,
            scale_size, K, FORMAT, SHARED,
        )  # fmt: skip
        own = gl.minimum(_thread(WARPS) % 32 // 4, count - 1)
        choice = gl.load(order + own).to(gl.int64)
        first = gl.program_id(0) * (8 * R)
        found = row_sums(
            _activation(x, choice * K, WARPS), codes, scales, first, H,
            K, R, WARPS, C, STAGES, FORMAT, False, True,
        )  # fmt: skip
        for pair in gl.static_range(R // 2):
            value = _plain(found[pair])
            row, one = _row(value, first + pair * 16), _one(value)
            value = value * _row_scale(row_scales, gl.minimum(row, H - 1), FORMAT)
            choice = gl.load(order + gl.minimum(one, count - 1)).to(gl.int64)
            gl.store(out + choice * H + row, value, mask=(row < H) & (one < count))


def _plan(part: str, w: WeightArgs, topk: int, x: Tensor) -> TurnsTiling:
    columns = w.rows // 2 if part == "gated" else w.rows
    shape = shape_key(FORMAT_NAMES[w.format], part, columns, w.columns, ROWS, topk)
    return sizes_for("fp4_experts", device_name(x.device), shape, TurnsTiling())


def _named(w: WeightArgs, plan: TurnsTiling, shared: object) -> dict[str, Any]:
    return {
        "K": w.columns, "R": plan.columns // 8, "WARPS": plan.warps, "C": plan.chunks,
        "STAGES": plan.stages, "FORMAT": w.format, "SHARED": int(shared is not None),
        "num_warps": plan.warps,
    }  # fmt: skip


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
    rows, topk = ids.shape
    experts = w13.matrices + (shared is not None)
    width, other = w2.columns, shared or (None, None)
    order = expert_order(ids, weights, experts, first_expert, ROWS)
    tiles = order.tiles.shape[0]
    inner = torch.empty(rows * topk, width, dtype=x.dtype, device=x.device)
    plan = _plan("gated", w13, topk, x)
    gated_tile_kernel[(triton.cdiv(2 * width, plan.columns), tiles)](
        x, *parts(w13, other[0]), order.order, order.tiles, inner, width, w13.matrices, topk,
        x.stride(0), w13.scale_size,
        **_named(w13, plan, shared),
    )  # fmt: skip
    each = torch.empty(rows * topk, w2.rows, dtype=torch.float32, device=x.device)
    plan = _plan("outer", w2, topk, x)
    outer_tile_kernel[(triton.cdiv(w2.rows, plan.columns), tiles)](
        inner, *parts(w2, other[1]), order.order, order.tiles, each, w2.rows, w2.matrices,
        w2.scale_size,
        **_named(w2, plan, shared),
    )  # fmt: skip
    return each
