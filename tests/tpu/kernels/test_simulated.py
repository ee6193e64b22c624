"""Kernels in Pallas's simulator: copies, waits, races and bounds, and planted faults."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ml4core_tpu.kernels.cache_write import write_index_keys, write_latents
from ml4core_tpu.kernels.numbers import e4m3_bytes, e4m3_values
from ml4core_tpu.kernels.sparse_mla import sparse_mla
from ml4core_tpu.kernels.target import Target, compiler_params

PAGE, PAGES, HEADS = 128, 2, 8
COLUMNS = 128


@pytest.fixture(autouse=True)
def simulator() -> Iterator[None]:
    """A fault leaves the simulator's state behind."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.races.races_found)


def codes(rng: np.random.Generator, *shape: int) -> jax.Array:
    return e4m3_bytes(jnp.asarray(rng.normal(size=shape), jnp.float32))


@pytest.mark.parametrize("target", ["simulator", "races"])
def test_sparse_mla_waits_for_each_copy(target: Target) -> None:
    """More keys than a buffer holds, and a row without any: no race, and no memory unwritten."""
    rng = np.random.default_rng(0)
    latents = codes(rng, PAGES, PAGE, 4, 128)
    ropes = codes(rng, PAGES, PAGE // 4, 4, 128).at[..., 64:].set(0)
    q = jnp.asarray(rng.normal(size=(2, HEADS, 576)), jnp.float32)
    slots = np.full((2, 140), -1, np.int32)
    slots[0, :3], slots[0, 130:133] = (5, 255, 17), (128, 0, 9)
    lens = jnp.asarray([140, 0], jnp.int32)
    out, lse = sparse_mla(
        q, latents, ropes, jnp.ones(1), jnp.asarray(slots), lens, scale=0.05, target=target
    )
    if target == "races":
        assert not races_found()
    chosen = slots[0][slots[0] >= 0]
    latent = np.asarray(e4m3_values(latents)).reshape(PAGES * PAGE, 512)[chosen]
    rope = np.asarray(e4m3_values(ropes)).reshape(PAGES * PAGE, 128)[chosen, :64]
    scores = 0.05 * np.asarray(q[0]) @ np.concatenate((latent, rope), -1).T
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ latent
    np.testing.assert_allclose(np.asarray(out[0]), want, atol=2e-5)
    assert (np.asarray(out[1]) == 0).all()
    assert (np.asarray(lse[1]) == -np.inf).all()


@pytest.mark.parametrize("target", ["simulator", "races"])
def test_tokens_of_one_tile_are_written_in_turn(target: Target) -> None:
    """Four tokens of one rope tile, and a slot outside of the cache."""
    rng = np.random.default_rng(1)
    latents = jnp.full((1, 8, 4, 128), 0xA5, jnp.uint8)
    ropes = jnp.full((1, 2, 4, 128), 0xA5, jnp.uint8)
    slots = jnp.asarray([5, 4, -1, 7, 6, 8], jnp.int32)
    latent = jnp.asarray(rng.normal(size=(6, 512)), jnp.float32)
    rope = jnp.asarray(rng.normal(size=(6, 64)), jnp.float32)
    first, second = write_latents(latents, ropes, jnp.ones(1), slots, latent, rope, target=target)
    if target == "races":
        assert not races_found()
    for row, slot in ((0, 5), (1, 4), (3, 7), (4, 6)):
        np.testing.assert_array_equal(first[0, slot].reshape(512), e4m3_bytes(latent[row]))
        np.testing.assert_array_equal(second[0, 1, slot % 4, :64], e4m3_bytes(rope[row]))
        assert (np.asarray(second[0, 1, slot % 4, 64:]) == 0).all()
    assert (np.asarray(first[0, :4]) == 0xA5).all()
    assert (np.asarray(second[0, 0]) == 0xA5).all()


def test_index_keys_of_one_group_are_written_in_turn() -> None:
    keys = jnp.full((1, 33, 4, 128), 0xA5, jnp.uint8)
    key = jnp.eye(2, 128, dtype=jnp.float32) * 448
    found = write_index_keys(keys, jnp.asarray([3, 2], jnp.int32), key, target="races")
    assert not races_found()
    columns = np.asarray(found[0]).reshape(132, 128)
    assert (columns[0, 3], columns[1, 3], columns[128, 3]) == (0x7E, 0, 127)
    assert (columns[0, 2], columns[1, 2]) == (0, 0x7E)
    assert (np.delete(columns, (2, 3), axis=1) == 0xA5).all()


def planted(target: Target, *, waits: bool = True, row: int = 1) -> np.ndarray:
    """A copy of a row, with a fault."""

    def kernel(source, out, buffer, sem):
        copy = pltpu.make_async_copy(source.at[row], buffer, sem)
        copy.start()
        if waits:
            copy.wait()
        out[...] = buffer[...]
        if not waits:
            copy.wait()

    return np.asarray(
        pl.pallas_call(
            kernel,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_shape=jax.ShapeDtypeStruct((8, COLUMNS), jnp.float32),
            scratch_shapes=[pltpu.VMEM((8, COLUMNS), jnp.float32), pltpu.SemaphoreType.DMA],
            **compiler_params(target, "arbitrary"),
        )(jnp.ones((2, 8, COLUMNS), jnp.float32))
    )


def test_an_honest_copy_passes() -> None:
    assert (planted("simulator") == 1).all()
    assert (planted("races") == 1).all()
    assert not races_found()


def test_a_planted_race_is_found() -> None:
    planted("races", waits=False)
    assert races_found()


def test_a_missing_wait_shows() -> None:
    assert np.isnan(planted("simulator", waits=False)).all()


def test_a_read_out_of_bounds_is_found() -> None:
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        planted("simulator", row=5)
