"""A layer of the tiny model with two steps of two data ranks: what children of tests run."""

from __future__ import annotations

from typing import Any

import jax  # noqa: TID253
import numpy as np
import torch

from ml4core_conformance import tiny
from ml4core_tpu.bridge import to_jax
from ml4core_tpu.kernels.layer.arrays import weights_of
from ml4core_tpu.kernels.layer.form import Caches, Matrix, Step
from ml4core_tpu.kernels.layer.mesh import joined_steps, ranked_rows
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.layouts import lane33_layout, tiles_layout

DATA, TENSOR, ROWS, PAGE, PAGES = 2, 4, 16, 128, 4
LAYER = tiny.model().layers[1]
KINDS = Rows("tiles", 512, 64)
DRAW = torch.Generator().manual_seed(0)


def step(requests: list[tuple[int, int]]) -> Step:
    """One data rank's: (tokens before, rows) of each request, the r-th of which has page r + 1."""
    rows = sum(count for _, count in requests)
    positions = [before + i for before, count in requests for i in range(count)]
    owner = [r for r, (_, count) in enumerate(requests) for _ in range(count)]
    starts = np.cumsum([0] + [count for _, count in requests])
    pages = np.arange(1, 4)[:, None]

    def padded(values: list[int], fill: int) -> np.ndarray:
        return np.array(values + [fill] * (ROWS - rows), np.int32)

    slots = [int(pages[r, 0]) * PAGE + p for r, p in zip(owner, positions, strict=True)]
    start = np.concatenate((starts, [starts[-1]] * (4 - len(starts)))).astype(np.int32)
    return Step(
        padded(positions, 0),
        padded(owner, 0),
        start,
        padded([p + 1 for p in positions], 0),
        *[pages.astype(np.int32)] * 2,
        *[padded(slots, -1)] * 2,
    )


STEPS = {
    "both": [step([(40, 1), (9, 3), (0, 7)]), step([(77, 1), (100, 1)])],
    "one idle": [step([(41, 1), (12, 1)]), step([])],
}


def caches() -> Caches:
    """One data rank's, full of rows."""
    scale = torch.ones(1)
    rows = torch.randn(PAGES, PAGE, 576, generator=DRAW)
    latent, rope = tiles_layout().pack(rows, scale)
    (keys,) = lane33_layout().pack(torch.randn(PAGES, PAGE, 128, generator=DRAW), None)
    parts = (latent.unflatten(2, (-1, 128)), rope.reshape(PAGES, PAGE // 4, 4, 128))
    held = Caches(tuple(map(to_jax, parts)), to_jax(scale), to_jax(keys.unflatten(1, (33, 4))))
    return jax.tree.map(np.array, held)


def ranked(weights: dict[str, Any]) -> dict[str, Any]:
    """Of all ranks: gate and up of the shared expert by rank, and the first expert of each."""
    shared = weights["shared_w13"]
    experts = weights["experts_w13"].data.shape[0]
    first = np.arange(DATA * TENSOR, dtype=np.int32) * (experts // (DATA * TENSOR))
    cut = Matrix({"data": ranked_rows(shared.data, TENSOR)}, shared.format)
    return {**weights, "shared_w13": cut, "first_expert": first}


def layer_weights() -> tuple[dict[str, Any], np.ndarray]:
    """The layer's, and the next layer's norm."""
    dense = tiny.weights(tiny.model(), 0).layers[1]
    norm = np.array(to_jax(dense["attention_norm"]))
    return jax.tree.map(np.array, weights_of(dense)), norm


def states() -> list[np.ndarray]:
    return [torch.randn(ROWS, LAYER.hidden_size, generator=DRAW).numpy() for _ in range(DATA)]


def whole(
    weights: dict[str, Any],
    steps: list[Step],
    held: list[Caches],
    given: list[np.ndarray],
    norm: np.ndarray,
) -> tuple[Any, ...]:
    """The arguments of all ranks together, behind the form."""
    every = jax.tree.map(lambda *parts: np.concatenate(parts), *held)
    rows = np.concatenate(given)
    placed = every._replace(scale=held[0].scale)
    return ranked(weights), joined_steps(steps), placed, rows, rows, None, norm


def real_rows(steps: list[Step]) -> np.ndarray:
    return np.concatenate([one.visible for one in steps]) > 0
