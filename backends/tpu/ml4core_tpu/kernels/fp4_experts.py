"""Routed experts with FP4 weights that meet plain inputs (W4A16).

A weight [N, K] of an expert lies as bytes [K / 2, N]. K is cut into blocks of 16 groups (256 for
NVFP4, 512 for MXFP4); byte j of a block holds the code of its column j in the low nibble, and of
column j + half a block in the high one. So a block is two operands, neither of which has to be
interleaved. Scales stay the checkpoint's bytes, [K / group, N].

A program is one tile of rows, all of one expert, and 128 or 256 columns. Codes times scales are
exact in bfloat16; the scale of a whole row of the weight multiplies fp32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.numbers import e4m3_words, e8m0_values
from ml4core_tpu.kernels.products import dot
from ml4core_tpu.kernels.target import Target, compiler_params

HALF = 8
"""Groups of half a block."""
_COLUMNS = 256


@dataclass(frozen=True)
class Fp4:
    """The form of FP4 weights: columns that a scale serves, and the scale's format."""

    group: int
    scale: Literal["e4m3", "e8m0"]

    @property
    def block(self) -> int:
        """Columns of K that K is a multiple of."""
        return 2 * HALF * self.group


NVFP4 = Fp4(16, "e4m3")
MXFP4 = Fp4(32, "e8m0")


def e2m1_values(code: jax.Array) -> jax.Array:
    """fp32 of E2M1 codes int32 0..15: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = code & 7
    exponent, half = size >> 1, size & 1
    normal = lax.bitcast_convert_type(((exponent + 126) << 23) | (half << 22), jnp.float32)
    value = jnp.where(exponent == 0, half.astype(jnp.float32) * 0.5, normal)
    return jnp.where(code >= 8, -value, value)


def _kernel(experts, live, x, weight, scale, row_scale, out, scales, *, fp4: Fp4):
    tile = pl.program_id(1)
    columns = out.shape[1]
    half = HALF * fp4.group
    blocks = weight.shape[1] // half

    @pl.when(tile < live[0])
    def _():
        code = scale[0].astype(jnp.int32)
        scales[...] = e4m3_words(code) if fp4.scale == "e4m3" else e8m0_values(code)

        def operand(codes: jax.Array, first: jax.Array) -> jax.Array:
            """[half, columns] of codes, with the scales from row ``first`` on."""
            mine = scales[pl.ds(first, HALF), :]
            values = e2m1_values(codes).reshape(HALF, fp4.group, columns) * mine[:, None, :]
            return values.reshape(half, columns).astype(x.dtype)

        def one(block: jax.Array, total: jax.Array) -> jax.Array:
            at = pl.multiple_of(block * half, half)
            packed = weight[0, pl.ds(at, half), :].astype(jnp.int32)
            row = pl.multiple_of(block * 2 * HALF, 2 * HALF)
            column = pl.multiple_of(block * 2 * half, 2 * half)
            low, high = operand(packed & 0xF, row), operand(packed >> 4, row + HALF)
            total += dot(x[:, pl.ds(column, half)], low, 0)
            return total + dot(x[:, pl.ds(column + half, half)], high, 0)

        total = lax.fori_loop(0, blocks, one, jnp.zeros(out.shape, jnp.float32))
        out[...] = (total * row_scale[0]).astype(out.dtype)

    @pl.when(tile >= live[0])
    def _():
        out[...] = jnp.zeros_like(out)


def grouped_matmul(
    x: jax.Array,
    experts: jax.Array,
    live: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    row_scale: jax.Array,
    *,
    fp4: Fp4,
    rows: int,
    out_dtype: jnp.dtype,
    target: Target,
) -> jax.Array:
    """Tiles of ``rows`` rows of ``x`` [M, K], each times the transpose of its expert's weight: to
    [M, N], zeros in tiles from ``live`` on.

    Args:
        experts: int32 [M / rows], that of each tile.
        live: int32 [1], tiles that have rows.
        weight: uint8 [E, K / 2, N].
        scale: uint8 [E, K / group, N].
        row_scale: fp32 [E, 1, N].
    """
    count, width = x.shape
    columns = weight.shape[2]
    each = _COLUMNS if columns % _COLUMNS == 0 else 128
    if columns % each or width % fp4.block:
        raise ValueError(
            f"weights [{columns}, {width}] are not of whole blocks of [128, {fp4.block}]"
        )
    tiles = count // rows

    def of_expert(depth: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, depth, each), lambda n, m, experts, live: (experts[m], 0, n))

    return pl.pallas_call(
        partial(_kernel, fp4=fp4),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(columns // each, tiles),
            in_specs=[
                pl.BlockSpec((rows, width), lambda n, m, *_: (m, 0)),
                of_expert(width // 2),
                of_expert(width // fp4.group),
                of_expert(1),
            ],
            out_specs=pl.BlockSpec((rows, each), lambda n, m, *_: (m, n)),
            scratch_shapes=[pltpu.VMEM((width // fp4.group, each), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((count, columns), out_dtype),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * columns * width,
            transcendentals=0,
            # Tiles of one expert follow each other, and its weight stays.
            bytes_accessed=min(tiles, weight.shape[0]) * columns * (width // 2 + width // fp4.group)
            + count * (width * x.dtype.itemsize + columns * jnp.dtype(out_dtype).itemsize),
        ),
        name="fp4_experts",
        **compiler_params(target, "parallel", "arbitrary"),
    )(experts, live, x, weight, scale, row_scale)
