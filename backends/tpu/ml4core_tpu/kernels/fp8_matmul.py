"""Products with FP8 weights: codes meet codes, or plain numbers, and scales come after.

Weights have a scale for each 128 x 128 block, or one for all; a quantised input has one a row.
Scales multiply fp32 sums of 128 terms, so that none is rounded into an operand.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.numbers import E4M3_MAX, e4m3_bytes
from ml4core_tpu.kernels.products import dot
from ml4core_tpu.kernels.target import Target, compiler_params

BLOCK = 128
"""Rows and columns that a scale of a weight serves."""
_ROWS = 256
_COLUMNS = 256
_AMAX_FLOOR = 1e-10
"""Least magnitude that a row's scale is made for."""


def quantized_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes uint8 [T, K] of ``x`` [T, K] and a scale fp32 [T, 1] a row: the largest finite
    magnitude over 448.
    """
    wide = x.astype(jnp.float32)
    size = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0).max(-1, keepdims=True)
    scale = jnp.maximum(size, _AMAX_FLOOR) / E4M3_MAX
    return e4m3_bytes(wide / scale), scale


def _kernel(x, row_scale, weight, scale, out, total, *, native: bool):
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    codes = pltpu.bitcast(weight[...], jnp.float8_e4m3fn)
    if x.dtype == jnp.uint8:
        rows = pltpu.bitcast(x[...], jnp.float8_e4m3fn)
        if not native:
            rows, codes = rows.astype(jnp.bfloat16), codes.astype(jnp.bfloat16)
    else:
        rows, codes = x[...], codes.astype(jnp.float32).astype(x.dtype)
    total[...] += dot(rows, codes, 1) * scale[0]

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        out[...] = (total[...] * row_scale[...]).astype(out.dtype)


@partial(jax.jit, static_argnames=("out_dtype", "quantize", "target"))
def fp8_matmul(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    out_dtype: jnp.dtype,
    quantize: bool,
    target: Target,
) -> jax.Array:
    """``x`` [T, K] times the transpose of a weight [N, K], to [T, N].

    Args:
        weight: codes uint8 [N, K].
        scale: fp32 [ceil(N / 128), ceil(K / 128)], or [] for all.
        quantize: whether ``x`` is quantised first, with a scale a row.
    """
    count, width = x.shape
    columns = weight.shape[0]
    rows = min(_ROWS, -(-count // 32) * 32)
    each = min(_COLUMNS, -(-columns // BLOCK) * BLOCK)
    given, row_scale = quantized_rows(x) if quantize else (x, jnp.ones((count, 1), jnp.float32))
    m, n, k = -(-count // rows), -(-columns // each), -(-width // BLOCK)
    given = jnp.pad(given, ((0, m * rows - count), (0, k * BLOCK - width)))
    row_scale = jnp.pad(row_scale, ((0, m * rows - count), (0, 0)))
    scales = jnp.broadcast_to(scale, (-(-columns // BLOCK), k)).astype(jnp.float32)
    # A scale for each column: [K / 128, 1, N].
    scales = jnp.repeat(scales.T, BLOCK, axis=1)[:, None, :columns]
    # What a last block has beyond the weight is in columns that nobody takes: only a block that is
    # larger than the weight is padded, as that moves all of it.
    held = max(columns, each)
    weight = jnp.pad(weight, ((0, held - columns), (0, k * BLOCK - width)))
    scales = jnp.pad(scales, ((0, 0), (0, 0), (0, held - columns)))
    out = pl.pallas_call(
        partial(_kernel, native=target == "tpu"),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(m, n, k),
            in_specs=[
                pl.BlockSpec((rows, BLOCK), lambda i, j, k: (i, k)),
                pl.BlockSpec((rows, 1), lambda i, j, k: (i, 0)),
                pl.BlockSpec((each, BLOCK), lambda i, j, k: (j, k)),
                pl.BlockSpec((1, 1, each), lambda i, j, k: (k, 0, j)),
            ],
            out_specs=pl.BlockSpec((rows, each), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((rows, each), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((m * rows, held), out_dtype),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * rows * n * each * k * BLOCK,
            transcendentals=0,
            bytes_accessed=m * n * k * each * BLOCK
            + m * rows * n * k * BLOCK * given.dtype.itemsize
            + m * rows * n * each * jnp.dtype(out_dtype).itemsize,
        ),
        name="fp8_matmul",
        **compiler_params(target, "parallel", "parallel", "arbitrary"),
    )(given, row_scale, weight, scales)
    return out[:count, :columns]


@partial(jax.jit, static_argnames=("out_dtype",))
def wide_matmul(x: jax.Array, weight: jax.Array, *, out_dtype: jnp.dtype) -> jax.Array:
    """``x`` [T, K] times the transpose of a plain weight [N, K], summed in fp32, to [T, N]."""
    wide = jnp.float32 in (x.dtype, weight.dtype)
    dtype = jnp.float32 if wide else jnp.bfloat16
    return dot(x.astype(dtype), weight.astype(dtype), 1).astype(out_dtype)
