"""The ``attn_output`` stage for very few rows: W_UV, the output projection, residual and norm, in
three launches that follow each other closely.

Rate model of one rank of eight of the full model at one row: 8 heads of [128, 512] in bf16, 1.0 MB,
and 6,144 rows of 1,024 e4m3 codes, 6.3 MB: 1.7 us at 4.25 TB/s, so that launches count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ml4core.api import LayerSpec, Weight
from ml4core_cuda.kernels.gemm import row_tiling
from ml4core_cuda.kernels.prefetch import prefetch_rows
from ml4core_cuda.kernels.row_sums import TOGETHER, row_sum
from ml4core_cuda.kernels.short_shapes import product_fits
from ml4core_triton.kernels.all_reduce_rms_norm import add_rms_norm
from ml4core_triton.kernels.chaining import dependent, let_next_begin, wait_for_previous
from ml4core_triton.kernels.numeric import narrow, next_power, widen
from ml4core_triton.kernels.target import units_of
from ml4core_triton.kernels.weights import BF16, FP8_BLOCK, NVFP4, weight_args, whole_scale

MAX_ROWS = 4
"""Rows of a step at most: each reads the weights anew, from the second cache."""

Weights = Mapping[str, Any]
_TOGETHER, _BF16 = tl.constexpr(TOGETHER), tl.constexpr(BF16)
_CODES, _FP4 = tl.constexpr(FP8_BLOCK), tl.constexpr(NVFP4)


@triton.jit
def _values_kernel(
    x, w_uv, values,
    N: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """W_UV times a head's row of latents, x [T N, L]: grid (T N, tiles of V)."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    column = tl.arange(0, BL)
    let_next_begin(DEPENDENT)
    # What no launch writes is read while the one before runs.
    where = w_uv + ((row % N) * V + v)[:, None] * L + column[None, :]
    matrix = tl.load(where, mask=(v < V)[:, None] & (column < L)[None, :], other=0.0)
    wait_for_previous(DEPENDENT)
    one = widen(tl.load(x + row * L + column, column < L, other=0.0))
    found = tl.sum(widen(matrix) * one[None, :], 1)
    tl.store(values + row * V + v, narrow(found, values.dtype.element_ty), v < V)


@triton.jit
def _rows_kernel(
    x, data, scale, row_scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A matrix [N, K] times each row, fp32: grid (tiles of N, T)."""
    SIZE: tl.constexpr = 1 if FORMAT >= _CODES else (2 if FORMAT == _BF16 else 4)
    STORED: tl.constexpr = 2 if FORMAT >= _FP4 else 1
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    fits = rows < N
    let_next_begin(DEPENDENT)
    prefetch_rows(data, rows, fits, K // STORED, SIZE, DEPENDENT)
    wait_for_previous(DEPENDENT)
    found = row_sum(
        x + token * K, data, scale, rows, fits, K, BN, BK, FORMAT, STAGES, _TOGETHER, EVEN
    )
    found = found * whole_scale(scale, row_scale, rows, fits, FORMAT, BN)
    tl.store(out + token * N + rows, found, mask=fits)


def attn_output(layer: LayerSpec) -> Callable[[Weights, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The stage's call of one rank. Its launches may begin before the end of those before them."""

    def call(w: Weights, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        made = attn_rows(w, layer, out.reshape(-1, layer.kv_lora_rank))
        state = add_rms_norm(made, residual, w["ffn_norm"], layer.norm_eps, ahead=True)
        assert state[1] is not None
        return state[0], state[1]

    return call


def attn_rows(w: Weights, layer: LayerSpec, out: Tensor) -> Tensor:
    """Attention's output before its residual, fp32 [T, H], of latents ``out`` [T N, L], dense."""
    rows, latent = out.shape
    heads, width, units = layer.heads, layer.v_dim, units_of(out.device)
    given: Tensor = w["w_uv"].data
    w_uv = given.contiguous()
    ahead = w_uv is given  # it is read before the wait: a copy would not have been made by then
    values = torch.empty(rows // heads, heads * width, dtype=w_uv.dtype, device=out.device)
    each = 32
    while each > 4 and rows * triton.cdiv(width, each) < units:
        each //= 2
    _values_kernel[(rows, triton.cdiv(width, each))](
        out, w_uv, values, N=heads, L=latent, V=width, BV=each, BL=next_power(latent),
        DEPENDENT=ahead, num_warps=4, **dependent(ahead),
    )  # fmt: skip
    wo: Weight = w["wo"]
    matrix = weight_args(wo)
    found = torch.empty(len(values), matrix.rows, dtype=torch.float32, device=out.device)
    if product_fits(values, matrix):
        from ml4core_cuda.kernels import row_turns

        row_turns.row_product(values, matrix, found, ahead=True)
        return found
    plan = row_tiling(matrix.rows, matrix.columns, len(values), units)
    _rows_kernel[(triton.cdiv(matrix.rows, plan.columns), len(values))](
        values, matrix.data, matrix.scale, matrix.row_scale, found, matrix.rows, matrix.columns,
        BN=plan.columns, BK=plan.block, FORMAT=matrix.format, STAGES=plan.stages,
        EVEN=matrix.columns % plan.block == 0, DEPENDENT=True, num_warps=plan.warps,
        **dependent(True),
    )  # fmt: skip
    return found
