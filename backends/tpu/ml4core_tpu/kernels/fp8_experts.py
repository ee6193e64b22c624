"""Routed experts with FP8 weights of 128 x 128 blocks that meet plain inputs (W8A16).

A weight [N, K] of an expert lies as the checkpoint has it. Codes are exact in bfloat16; a block's
scale multiplies fp32 sums of 128 terms, so that none is rounded into an operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.expert_matmul import TOGETHER, Operand, Parts
from ml4core_tpu.kernels.fp8_matmul import BLOCK
from ml4core_tpu.kernels.products import dot

_COLUMNS = 1024
"""Of a program: with more of them rows are fetched less often. 6 MiB of codes of 6,144 columns."""


@dataclass(frozen=True)
class Fp8:
    """The form of FP8 weights: codes uint8 [E, N, K], and scales fp32 [E, ceil(N / 128),
    ceil(K / 128)].
    """

    name: str = "fp8_experts"
    group: int = BLOCK

    def size(self, parts: Parts) -> tuple[int, int, int]:
        held, columns, width = parts[0].shape
        return held, columns, -(-width // BLOCK) * BLOCK

    def columns(self, count: int) -> int:
        return min(_COLUMNS, -(-count // BLOCK) * BLOCK)

    def operands(self, parts: Parts, each: int) -> list[Operand]:
        codes, scale = parts
        held, columns, width = codes.shape
        blocks = -(-columns // BLOCK), -(-width // BLOCK)
        if scale.shape != (held, *blocks):
            raise ValueError(
                f"codes {codes.shape} have scales {(held, *blocks)}, not {scale.shape}"
            )
        # What a last block has beyond the weight is in columns that nobody takes: only a block that
        # is larger than the weight is padded, and K, as that moves all of it.
        short = max(each - columns, 0), blocks[1] * BLOCK - width
        codes = jnp.pad(codes, ((0, 0), (0, short[0]), (0, short[1])))
        # A program's scales side by side: [E, N / each, K / 128, each / 128].
        here = each // BLOCK
        scale = jnp.pad(scale, ((0, 0), (0, -blocks[0] % here), (0, 0)))
        scale = scale.reshape(held, -1, here, blocks[1]).swapaxes(2, 3)
        return [
            Operand(codes, (each, codes.shape[2]), 0),
            Operand(scale, (1, blocks[1], here), 0),
        ]

    def add(self, x: Any, blocks: list[Any], scales: Any, total: Any) -> float:
        codes, scale = blocks
        known = scale[0, 0]  # [K / 128, each / 128]
        for at in range(known.shape[1]):
            wide = jnp.broadcast_to(known[:, at : at + 1], (known.shape[0], BLOCK))
            scales[:, at * BLOCK : (at + 1) * BLOCK] = wide

        some = TOGETHER if total.shape[1] % TOGETHER == 0 else BLOCK
        here = total.shape[1] // some

        def one(step: jax.Array, carry: None) -> None:
            block, place = lax.div(step, here), lax.rem(step, here)
            at, first = pl.multiple_of(block * BLOCK, BLOCK), pl.multiple_of(place * some, some)
            mine = pl.ds(first, some)
            values = pltpu.bitcast(codes[0, mine, pl.ds(at, BLOCK)], jnp.float8_e4m3fn)
            operand = values.astype(jnp.float32).astype(x.dtype)
            found = dot(x[:, pl.ds(at, BLOCK)], operand, 1)
            total[:, mine] += found * scales[pl.ds(block, 1), mine]

        lax.fori_loop(0, known.shape[0] * here, one, None)
        return 1.0


FP8 = Fp8()
