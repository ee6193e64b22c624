"""Routed experts with FP4 weights that meet plain inputs (W4A16).

A weight [N, K] of an expert lies as bytes [K / 2, N]. K is cut into blocks of 16 groups (256 for
NVFP4, 512 for MXFP4); byte j of a block holds the code of its column j in the low nibble, and of
column j + half a block in the high one. So a block is two operands, neither of which has to be
interleaved. Scales stay the checkpoint's bytes, [K / group, N].

Codes times scales are exact in bfloat16; the scale of a whole row of the weight multiplies fp32
sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ml4core_tpu.kernels.expert_matmul import TOGETHER, Operand, Parts
from ml4core_tpu.kernels.numbers import e4m3_words, e8m0_values
from ml4core_tpu.kernels.products import dot

HALF = 8
"""Groups of half a block."""
_COLUMNS = (1024, 512, 256, 128)


def e2m1_values(code: jax.Array) -> jax.Array:
    """fp32 of E2M1 codes int32 0..15: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = code & 7
    exponent, half = size >> 1, size & 1
    normal = lax.bitcast_convert_type(((exponent + 126) << 23) | (half << 22), jnp.float32)
    value = jnp.where(exponent == 0, half.astype(jnp.float32) * 0.5, normal)
    return jnp.where(code >= 8, -value, value)


@dataclass(frozen=True)
class Fp4:
    """The form of FP4 weights: codes uint8 [E, K / 2, N], scales uint8 [E, K / group, N], and the
    scales of rows fp32 [E, 1, N].

    Attributes:
        group: columns that a scale serves.
        scale: its format.
    """

    group: int
    scale: Literal["e4m3", "e8m0"]
    name: str = "fp4_experts"

    @property
    def block(self) -> int:
        """Columns of K that K is a multiple of."""
        return 2 * HALF * self.group

    def size(self, parts: Parts) -> tuple[int, int, int]:
        held, depth, columns = parts[0].shape
        return held, columns, 2 * depth

    def columns(self, count: int) -> int:
        return next((each for each in _COLUMNS if count % each == 0), _COLUMNS[-1])

    def operands(self, parts: Parts, each: int) -> list[Operand]:
        _, columns, width = self.size(parts)
        if columns % each or width % self.block:
            raise ValueError(
                f"weights [{columns}, {width}] are not of whole blocks of [128, {self.block}]"
            )
        return [Operand(part, (part.shape[1], each), 1) for part in parts]

    def add(self, x: Any, blocks: list[Any], scales: Any, total: Any) -> jax.Array:
        weight, scale, row_scale = blocks
        half, columns = HALF * self.group, min(TOGETHER, total.shape[1])
        here = total.shape[1] // columns
        code = scale[0].astype(jnp.int32)
        scales[...] = e4m3_words(code) if self.scale == "e4m3" else e8m0_values(code)

        def operand(codes: jax.Array, first: jax.Array, mine: Any) -> jax.Array:
            """[half, columns] of codes, with the scales from row ``first`` on."""
            known = scales[pl.ds(first, HALF), mine]
            values = e2m1_values(codes).reshape(HALF, self.group, columns) * known[:, None, :]
            return values.reshape(half, columns).astype(x.dtype)

        def one(step: jax.Array, carry: None) -> None:
            block, place = lax.div(step, here), lax.rem(step, here)
            mine = pl.ds(pl.multiple_of(place * columns, columns), columns)
            at = pl.multiple_of(block * half, half)
            packed = weight[0, pl.ds(at, half), mine].astype(jnp.int32)
            row = pl.multiple_of(block * 2 * HALF, 2 * HALF)
            column = pl.multiple_of(block * 2 * half, 2 * half)
            low, high = operand(packed & 0xF, row, mine), operand(packed >> 4, row + HALF, mine)
            found = dot(x[:, pl.ds(column, half)], low, 0)
            total[:, mine] += found + dot(x[:, pl.ds(column + half, half)], high, 0)

        lax.fori_loop(0, weight.shape[1] // half * here, one, None)
        return row_scale[0]


NVFP4 = Fp4(16, "e4m3")
MXFP4 = Fp4(32, "e8m0")
