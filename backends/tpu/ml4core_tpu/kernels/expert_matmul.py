"""Rows in tiles of one expert, each times the transpose of that expert's quantised weight.

A program is one tile of rows, all of one expert, and some columns. The weights' form says how a
block of them lies and how it is decoded; the grid is the same for all.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.target import Target, compiler_params

TOGETHER = 256
"""Columns of a product within a program: its code, and the time to compile it, grow with them."""

Parts = tuple[jax.Array, ...]
"""Arrays of a stack of weights, as their form has them."""


class Operand(NamedTuple):
    """An array [E, ...] of which a program reads a block of its expert.

    Attributes:
        shape: of the block, without the expert's axis.
        axis: the one of ``shape`` along which blocks of columns follow each other.
    """

    array: jax.Array
    shape: tuple[int, ...]
    axis: int


class Form(Protocol):
    """How weights lie. Static: hashable, and equal for equal weights."""

    @property
    def name(self) -> str:
        """Of the kernel."""
        ...

    @property
    def group(self) -> int:
        """Columns of K that a scale serves."""
        ...

    def size(self, parts: Parts) -> tuple[int, int, int]:
        """Experts, rows N of a weight, and its columns K with those that pad it."""
        ...

    def columns(self, count: int) -> int:
        """Rows of a weight, which are columns of the result, that a program takes of N."""
        ...

    def operands(self, parts: Parts, each: int) -> list[Operand]:
        """What a program reads, for ``each`` columns. ``ValueError`` for shapes it can't have."""
        ...

    def add(self, x: Any, blocks: list[Any], scales: Any, total: Any) -> jax.Array | float:
        """Adds x [rows, K] times a block's transpose to the reference ``total`` [rows, each];
        answers what the sum is multiplied by. ``scales`` is fp32 [K / group, each], its own.
        """
        ...


def _kernel(experts, live, x, *refs, form: Form):
    *blocks, out, scales, total = refs
    tile = pl.program_id(1)

    @pl.when(tile < live[0])
    def _():
        total[...] = jnp.zeros_like(total)
        factor = form.add(x, blocks, scales, total)
        out[...] = (total[...] * factor).astype(out.dtype)

    @pl.when(tile >= live[0])
    def _():
        out[...] = jnp.zeros_like(out)


def grouped_matmul(
    x: jax.Array,
    experts: jax.Array,
    live: jax.Array,
    parts: Parts,
    *,
    form: Form,
    rows: int,
    likely: int,
    out_dtype: jnp.dtype,
    target: Target,
) -> jax.Array:
    """Tiles of ``rows`` rows of ``x`` [M, K], each times the transpose of its expert's weight: to
    [M, N], zeros in tiles from ``live`` on.

    Args:
        experts: int32 [M / rows], that of each tile.
        live: int32 [1], tiles that have rows. Of others nothing is fetched.
        likely: tiles that have rows if they are spread evenly, for the compiler's account alone.
    """
    held, columns, width = form.size(parts)
    x = jnp.pad(x, ((0, 0), (0, width - x.shape[1])))
    count = x.shape[0]
    tiles, each = count // rows, form.columns(columns)
    operands = form.operands(parts, each)
    steps = -(-columns // each)

    def of_expert(operand: Operand) -> pl.BlockSpec:
        def place(n, m, experts, live):
            return (
                experts[m],
                *(n if at == operand.axis else 0 for at in range(len(operand.shape))),
            )

        return pl.BlockSpec((1, *operand.shape), place)

    # Rows of a tile behind the live ones are those of the last live one, which are there already.
    tile_rows = pl.BlockSpec(
        (rows, width), lambda n, m, experts, live: (jnp.minimum(m, jnp.maximum(live[0] - 1, 0)), 0)
    )
    item, out_item = x.dtype.itemsize, jnp.dtype(out_dtype).itemsize
    weights = sum(one.array.nbytes for one in operands) // held
    return pl.pallas_call(
        partial(_kernel, form=form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps, tiles),
            in_specs=[tile_rows, *map(of_expert, operands)],
            out_specs=pl.BlockSpec((rows, each), lambda n, m, *_: (m, n)),
            scratch_shapes=[
                pltpu.VMEM((width // form.group, each), jnp.float32),
                pltpu.VMEM((rows, each), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((count, columns), out_dtype),
        cost_estimate=pl.CostEstimate(
            flops=2 * likely * rows * columns * width,
            transcendentals=0,
            # Tiles of one expert follow each other, and its weight stays; rows come with each block
            # of columns.
            bytes_accessed=min(likely, held) * weights
            + steps * likely * rows * width * item
            + count * columns * out_item,
        ),
        name=form.name,
        **compiler_params(target, "parallel", "arbitrary"),
    )(experts, live, x, *(one.array for one in operands))
