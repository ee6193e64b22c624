"""Angles by integer products, as no TPU has float64; and tiles of rows that follow requests."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ml4core.api import SSMaxSpec
from ml4core.compose.ops.positions import rope as composed_rope
from ml4core.compose.ops.positions import ssmax as composed_ssmax
from ml4core_tpu.kernels.layer.tiling import tiles_of
from ml4core_tpu.kernels.positions import angles, rope, ssmax, turns

FREQUENCIES = [1.0, 0.3, 2.7, 1e-2, 1e-5, 3e-9, 100.0]
POSITIONS = [0, 1, 2, 999, 123_457, 2**20 - 1, 2**20]


def test_angles_are_exact_at_far_positions() -> None:
    freq = np.array(FREQUENCIES, np.float32)
    place = np.array(POSITIONS, np.int32)
    table = np.array(turns(freq.tolist()), np.int64).astype(np.int32).T
    cos, sin = jax.jit(angles)(place, table)
    exact = place[:, None].astype(np.float64) * freq.astype(np.float64)
    assert np.abs(np.asarray(cos) - np.cos(exact)).max() < 2.0**-23
    assert np.abs(np.asarray(sin) - np.sin(exact)).max() < 2.0**-23


def test_a_product_in_float32_would_not_do() -> None:
    """What the integers are for: at 2^20 a rounded angle is off by hundredths."""
    freq, place = np.float32(0.3), np.float32(2**20 - 1)
    rounded = float(np.cos(np.float64(freq * place)))
    assert abs(rounded - np.cos(np.float64(freq) * np.float64(place))) > 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_frequency_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="rotary frequency"):
        turns([1.0, value])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_pairs_as_composed(interleaved: bool) -> None:
    freq = torch.tensor(FREQUENCIES[:4])
    place = torch.tensor(POSITIONS)
    x = torch.randn(len(place), 2, 8, generator=torch.Generator().manual_seed(0))
    want = composed_rope(x, place, freq, interleaved, 1.0)
    table = np.array(turns(freq.tolist()), np.int64).astype(np.int32).T
    turned = angles(jnp.asarray(place.numpy().astype(np.int32)), jnp.asarray(table))
    found = rope(jnp.asarray(x.numpy()), *turned, interleaved)
    assert np.abs(np.asarray(found) - want.numpy()).max() < 1e-6


@pytest.mark.parametrize(
    "spec",
    [
        SSMaxSpec("llama4", original_max_position=64),
        SSMaxSpec("log", per_head=True, bias=True),
        SSMaxSpec("pow", original_max_position=64),
        SSMaxSpec("floor", original_max_position=64, n_limit=100),
    ],
    ids=lambda spec: spec.kind,
)
def test_scales_of_queries_are_as_composed(spec: SSMaxSpec) -> None:
    draw = torch.Generator().manual_seed(1)
    place = torch.tensor([0, 62, 63, 64, 500])
    x = torch.randn(len(place), 3, 4, generator=draw)
    learned = [torch.rand(3, generator=draw) if has else None for has in (spec.per_head, spec.bias)]
    want = composed_ssmax(x, place, spec, *learned)
    given = [None if one is None else jnp.asarray(one.numpy()) for one in learned]
    found = ssmax(jnp.asarray(x.numpy()), jnp.asarray(place.numpy(), jnp.int32), spec, *given)
    assert np.abs(np.asarray(found) - want.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    "starts", [[0, 1, 2, 3], [0, 5, 5, 16], [0, 0, 0, 7], [0, 16, 16, 16], [0, 0, 0, 0]]
)
def test_tiles_cover_the_rows_of_each_request_once(starts: list[int]) -> None:
    rows, each = 16, 4
    table = jnp.arange(3, dtype=jnp.int32)[:, None]
    made = jax.jit(partial(tiles_of, rows=rows, each=each))(table, jnp.asarray(starts, jnp.int32))
    of, begin = (np.asarray(part) for part in made)
    owner = [-1] * rows
    for tile in range(len(of)):
        assert 0 <= begin[tile + 1] - begin[tile] <= each
        for row in range(begin[tile], begin[tile + 1]):
            assert owner[row] == -1
            owner[row] = int(of[tile, 0])
    want = [next((r for r in range(3) if starts[r] <= i < starts[r + 1]), -1) for i in range(rows)]
    assert owner == want
