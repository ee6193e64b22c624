"""Exact top-k by bisection on ordered integers: no sort, and the same bits wherever it runs.

A program is one row, as [G, 128]: column c stands at [c / 128, c % 128]. Running counts of what is
chosen are products with triangles of ones, and the j-th chosen column is found by comparing counts:
first its group of 128, then its lane. All numbers are counts, exact in the operands' bfloat16 (to
128) and in the fp32 of sums (to 2**24).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.target import Target, compiler_params

_LEAST = -(2**31)
_SIGN = 0x7FFFFFFF
_LANES = 128
_CHUNK = 128
"""Groups that are counted together."""
_WANTED = 256
"""Results that are looked up together."""


def _triangle(size: int, below: bool) -> jax.Array:
    """Ones bfloat16 [size, size] strictly below the diagonal, or above and on it."""
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return (column < row if below else column >= row).astype(jnp.float32).astype(jnp.bfloat16)


def _dot(a: jax.Array, b: jax.Array, axis: int = 0) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _bits(marks: jax.Array) -> jax.Array:
    return marks.astype(jnp.float32).astype(jnp.bfloat16)


def _kernel(visible, scores, positions, facts, key, inside, before, *, k: int, chunk: int):
    groups = scores.shape[1]
    chunks = groups // chunk
    column = lax.broadcasted_iota(jnp.int32, (groups, _LANES), 0) * _LANES
    column += lax.broadcasted_iota(jnp.int32, (groups, _LANES), 1)
    seen = column < visible[pl.program_id(0)]
    found = scores[0]
    nan = jnp.isnan(found) & seen
    # Integers in the order of the numbers. 0 and -0 are equal, and no number is the least integer.
    bits = lax.bitcast_convert_type(jnp.where(found == 0, 0.0, found), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ _SIGN, bits)
    key[...] = jnp.where(seen & ~nan, ordered, _LEAST)

    def count(marks: jax.Array) -> jax.Array:
        return jnp.sum(marks.astype(jnp.int32))

    def halve(step: jax.Array, border: jax.Array) -> jax.Array:
        """Raises the border by 2**(31 - step) where k keys stay at or above it."""
        # From the least integer on, by wrap-around: the first step reaches 0.
        raised = border + lax.shift_left(jnp.int32(1), 31 - step)
        return jnp.where(count(key[...] >= raised) >= k, raised, border)

    # The largest integer that k keys reach: the k-th key, or the least where there are fewer.
    border = lax.fori_loop(0, 32, halve, jnp.int32(_LEAST))
    left = (k - count(key[...] > border)).astype(jnp.float32)
    upper, lower = _triangle(_LANES, below=False), _triangle(chunk, below=True)
    ones = jnp.ones((_LANES, _LANES), jnp.bfloat16)

    def choose(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Counts a chunk's ties, and what is chosen of it; ``carry`` are the counts before."""
        tied, taken = carry
        rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        mine = key[rows, :]
        ties = (mine == border) & (mine > _LEAST)
        marks = _bits(ties)
        each = _dot(marks, ones)  # of its group, in every lane
        rank = tied + _dot(lower, each.astype(jnp.bfloat16)) + _dot(marks, upper)
        chosen = _bits((mine > border) | (ties & (rank <= left)))
        inside[rows, :] = _dot(chosen, upper).astype(jnp.bfloat16)
        groups_of = _dot(jnp.ones((8, _LANES), jnp.bfloat16), chosen, 1)  # [8, chunk], by lane
        above = _triangle(chunk, below=False)
        running = _dot(groups_of.astype(jnp.bfloat16), above)
        before[:, rows] = taken + running - groups_of
        return tied + jnp.sum(ties.astype(jnp.float32)), taken + jnp.sum(chosen.astype(jnp.float32))

    _, taken = lax.fori_loop(0, chunks, choose, (jnp.float32(0), jnp.float32(0)))
    lane = lax.broadcasted_iota(jnp.int32, (1, _LANES), 1)
    broken = count(nan)
    facts[0] = jnp.where(lane == 0, taken.astype(jnp.int32), jnp.where(lane == 1, broken, 0))
    starts = before[:1, :]  # [1, G]
    group_of = lax.broadcasted_iota(jnp.int32, (1, groups), 1)
    size = min(_WANTED, positions.shape[2])

    def look(i: jax.Array, carry: jax.Array) -> jax.Array:
        """The columns of ``size`` results."""
        first = pl.multiple_of(i * size, size)
        wanted = (first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)).astype(jnp.float32)
        # The last group that starts at or before it, among those that start there the last: of
        # groups without any, the one behind them has it.
        group = jnp.sum((starts <= wanted).astype(jnp.int32), -1, keepdims=True) - 1
        mine = group_of == group  # [size, G]
        start = jnp.sum(jnp.where(mine, starts, 0.0), -1, keepdims=True)
        counts = _dot(_bits(mine), inside[...])
        place = jnp.sum((counts <= wanted - start).astype(jnp.int32), -1, keepdims=True)
        at = jnp.where(wanted < taken, group * _LANES + place, -1)  # [size, 1]
        # Sublanes to lanes, by a sum that has one term: every program writes rows of lanes.
        diagonal = lax.broadcasted_iota(jnp.int32, (size, size), 0) == lax.broadcasted_iota(
            jnp.int32, (size, size), 1
        )
        positions[0, :, pl.ds(first, size)] = jnp.sum(jnp.where(diagonal, at, 0), 0, keepdims=True)
        return carry

    lax.fori_loop(0, positions.shape[2] // size, look, jnp.int32(0))


@partial(jax.jit, static_argnames=("k", "target"))
def topk(
    scores: jax.Array, visible: jax.Array, *, k: int, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Positions int32 [T, k] of the k largest among the first visible [T] of scores fp32 [T, S],
    ties to the lowest position, ascending, -1 behind; their count int32 [T]; whether a visible
    score was NaN, bool [T]. S is at most 2**23.
    """
    rows, columns = scores.shape
    groups = -(-columns // _LANES)
    chunk = min(_CHUNK, -(-groups // 16) * 16)
    groups = -(-groups // chunk) * chunk
    scores = jnp.pad(scores, ((0, 0), (0, groups * _LANES - columns)))
    size = min(_WANTED, -(-k // _LANES) * _LANES)
    wanted = -(-k // size) * size
    positions, facts = pl.pallas_call(
        partial(_kernel, k=k, chunk=chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows,),
            in_specs=[pl.BlockSpec((1, groups, _LANES), lambda t, *_: (t, 0, 0))],
            out_specs=[
                pl.BlockSpec((1, 1, wanted), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec((1, 1, _LANES), lambda t, *_: (t, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((groups, _LANES), jnp.int32),
                pltpu.VMEM((groups, _LANES), jnp.bfloat16),
                pltpu.VMEM((8, groups), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, 1, wanted), jnp.int32),
            jax.ShapeDtypeStruct((rows, 1, _LANES), jnp.int32),
        ],
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * groups * _LANES * (32 + 3 * _LANES + wanted),
            transcendentals=0,
            bytes_accessed=4 * rows * (groups * _LANES + wanted),
        ),
        name="topk",
        **compiler_params(target, "parallel"),
    )(jnp.minimum(visible, columns), scores.reshape(rows, groups, _LANES))
    return positions[:, 0, :k], facts[:, 0, 0], facts[:, 0, 1] > 0
