"""Kernels whose blocks Pallas itself copies, in its simulator: no race, no read out of bounds, and
nothing of memory that nobody wrote in what comes out, which is what XLA makes of the same grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.expert_matmul import Form, grouped_matmul
from ml4core_tpu.kernels.fp4_experts import MXFP4, NVFP4
from ml4core_tpu.kernels.fp8_experts import FP8
from ml4core_tpu.kernels.fp8_matmul import fp8_matmul
from ml4core_tpu.kernels.index_scores import index_scores
from ml4core_tpu.kernels.numbers import e4m3_bytes
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.kernels.target import Target
from ml4core_tpu.kernels.topk import topk
from ml4core_tpu.kernels.window_mla import window_mla

PAGE, PAGES = 128, 3
RNG = np.random.default_rng(0)
Run = Callable[[Target], Any]


@pytest.fixture(autouse=True)
def simulator() -> Iterator[None]:
    """A fault leaves the simulator's state behind."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def codes(*shape: int) -> jax.Array:
    return e4m3_bytes(normal(*shape))


def grouped(form: Form, parts: tuple[jax.Array, ...], width: int) -> Run:
    """Three tiles of 16 rows, of which one is not live and names the last live one's expert."""
    x, experts, live = normal(48, width), jnp.asarray([0, 1, 1], jnp.int32), jnp.asarray([2])

    def run(target: Target) -> jax.Array:
        return grouped_matmul(
            x,
            experts,
            live.astype(jnp.int32),
            parts,
            form=form,
            rows=16,
            likely=2,
            out_dtype=jnp.dtype(jnp.float32),
            target=target,
        )

    return run


def fp8_experts() -> Run:
    """The last block has rows and columns that the weight has not."""
    return grouped(FP8, (codes(2, 1100, 160), abs(normal(2, 9, 2))), 160)


def fp4_experts(form: Any) -> Run:
    width, columns = form.block, 256
    scale = RNG.integers(40, 60, (2, width // form.group, columns))
    stored = jnp.asarray(scale + (64 if form is MXFP4 else 0), jnp.uint8)
    packed = jnp.asarray(RNG.integers(0, 256, (2, width // 2, columns)), jnp.uint8)
    return grouped(form, (packed, stored, normal(2, 1, columns)), width)


def matmul(quantize: bool) -> Run:
    """Rows, columns and terms that no block divides."""
    x, weight, scale = normal(5, 200).astype(jnp.bfloat16), codes(300, 200), abs(normal(3, 2))

    def run(target: Target) -> jax.Array:
        return fp8_matmul(
            x, weight, scale, out_dtype=jnp.dtype(jnp.float32), quantize=quantize, target=target
        )

    return run


TABLE = jnp.asarray([[2, 1], [1, 7]], jnp.int32)
"""Of two requests; the second has a page that no cache has, which none of its rows sees."""
STARTS = jnp.asarray([0, 3, 5], jnp.int32)
VISIBLE = jnp.asarray([0, 130, 131, 9, 100], jnp.int32)


def window(kind: str, reach: int | None) -> Run:
    """A row that sees nothing, rows that see over a page's end, and pages that none sees."""
    rows: Any = Rows(kind, 512, 64)  # type: ignore[arg-type]
    parts: tuple[jax.Array, ...] = (normal(PAGES, PAGE, 576),)
    if kind == "tiles":
        tail = codes(PAGES, PAGE // 4, 4, 128).at[..., 64:].set(0)
        parts = (codes(PAGES, PAGE, 4, 128), tail)
    q = normal(5, 8, 576)

    def run(target: Target) -> tuple[jax.Array, jax.Array]:
        return window_mla(
            q,
            parts,
            jnp.ones(1),
            TABLE,
            STARTS,
            VISIBLE,
            rows=rows,
            max_rows=4,
            scale=0.05,
            window=reach,
            target=target,
        )

    return run


def scores() -> Run:
    keys = jnp.full((PAGES, 33, 4, PAGE), 127, jnp.uint8).at[:, :32].set(codes(PAGES, 32, 4, PAGE))
    q, weights = normal(5, 8, 128), normal(5, 8)

    def run(target: Target) -> jax.Array:
        return index_scores(
            q, weights, keys, TABLE, STARTS, VISIBLE, max_rows=4, scale=0.1, target=target
        )

    return run


def chosen() -> Run:
    """With ties at the border, and rows of fewer keys than are wanted."""
    given = jnp.round(normal(3, 700) * 2)
    visible = jnp.asarray([700, 300, 5], jnp.int32)
    return lambda target: topk(given, visible, k=40, target=target)


CASES: dict[str, Callable[[], Run]] = {
    "fp8_experts": fp8_experts,
    "fp4_experts, nvfp4": lambda: fp4_experts(NVFP4),
    "fp4_experts, mxfp4": lambda: fp4_experts(MXFP4),
    "fp8_matmul": lambda: matmul(False),
    "fp8_matmul, quantized": lambda: matmul(True),
    "window_mla, tiles": lambda: window("tiles", 20),
    "window_mla, wide": lambda: window("wide", None),
    "index_scores": scores,
    "topk": chosen,
}


@pytest.mark.parametrize("name", CASES)
def test_a_grid_reads_what_is_there_and_waits_for_it(name: str) -> None:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    run = CASES[name]()
    want = jax.tree.leaves(run("host"))
    assert not any(np.isnan(np.asarray(one, np.float32)).any() for one in want)
    targets: tuple[Target, ...] = ("simulator", "races")
    for target in targets:
        found = jax.tree.leaves(run(target))
        for mine, expected in zip(found, want, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-4, err_msg=target)
    assert not interpret_pallas_call.races.races_found
