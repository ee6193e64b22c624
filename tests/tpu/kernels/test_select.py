"""Selection and attention in chunks of a step's rows: the same as of all rows at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ml4core_conformance import tiny
from ml4core_tpu.kernels.layer import attention, indexer, tiling
from ml4core_tpu.kernels.layer.form import Caches, Step, form_of
from ml4core_tpu.kernels.rows import Rows

PAGE, PAGES, ROWS = 16, 8, 40


def step() -> Step:
    """Decodes, a window, and two chunks, which no cut of 20 rows respects; three rows of none."""
    counts, before = [1, 1, 4, 13, 18], [30, 2, 17, 0, 9]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    request = np.repeat(np.arange(5), counts)
    positions = np.concatenate([b + np.arange(n) for b, n in zip(before, counts, strict=True)])
    table = np.array([[1, 2], [3, 0], [4, 5], [6, 0], [7, 2]], np.int32)

    def padded(values: np.ndarray, fill: int) -> jax.Array:
        return jnp.asarray(np.pad(values, (0, ROWS - len(values)), constant_values=fill), jnp.int32)

    row = padded(positions, 0)
    visible, none = padded(positions + 1, 0), padded(positions[:0], -1)
    tables = jnp.asarray(table)
    return Step(row, padded(request, 0), jnp.asarray(starts), visible, tables, tables, none, none)


def test_chunks_of_rows_select_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tiny.model(topk=8).layers[1]
    spec = layer.indexer
    assert spec is not None
    form = form_of(layer, Rows("wide", 512, 64))
    draw = np.random.default_rng(0)
    keys = draw.standard_normal((PAGES, PAGE, spec.head_dim), np.float32)
    latents = jnp.zeros((PAGES, PAGE, 576), jnp.int32)
    caches = Caches((latents,), jnp.ones(1), jnp.asarray(keys.view(np.int32)))
    q = jnp.asarray(draw.standard_normal((ROWS, spec.heads, spec.head_dim), np.float32))
    weights = jnp.asarray(draw.standard_normal((ROWS, spec.heads), np.float32))
    one = step()

    def found() -> list[np.ndarray]:
        chosen = jax.jit(lambda *given: indexer.select(form, *given))(one, caches, q, weights)
        return [np.asarray(part) for part in chosen]

    whole = found()
    monkeypatch.setattr(indexer, "_SCORE_BYTES", 1)
    assert tiling._LEAST_CHUNK < ROWS
    for mine, theirs in zip(found(), whole, strict=True):
        assert np.array_equal(mine, theirs)
    positions, lens, slots, _ = whole
    assert lens.tolist() == [min(8, n) for n in one.visible.tolist()]
    for row, request in enumerate(one.request.tolist()):
        for position, slot in zip(positions[row][: lens[row]], slots[row], strict=False):
            page = int(one.latent_table[request, position // PAGE])
            assert slot == page * PAGE + position % PAGE


def test_chunks_of_rows_attend_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer without an indexer, whose rows see all keys."""
    form = form_of(tiny.model().layers[1], Rows("wide", 512, 64))
    draw = np.random.default_rng(1)
    latents = jnp.asarray(draw.standard_normal((PAGES, PAGE, 576), np.float32))
    caches = Caches((latents,), jnp.ones(1), None)
    q = jnp.asarray(draw.standard_normal((ROWS, 4, 576), np.float32)) / 24
    one = step()

    def found() -> np.ndarray:
        return np.asarray(jax.jit(lambda q: attention.attend(form, one, caches, q, None))(q))

    whole = found()
    monkeypatch.setattr(attention, "_TABLE_BYTES", 1)
    np.testing.assert_allclose(found(), whole, rtol=1e-5, atol=1e-5)
    row, request = 30, 4
    assert (int(one.request[row]), int(one.visible[row])) == (request, 21)
    seen = np.asarray(latents)[np.asarray(one.latent_table)[request]].reshape(-1, 576)[:21]
    scores = np.asarray(q[row]) @ seen.T * form.layer.softmax_scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ seen[:, :512]
    np.testing.assert_allclose(whole[row], want, rtol=1e-4, atol=1e-4)
    assert (whole[37:] == 0).all()
