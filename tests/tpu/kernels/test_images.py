"""The encoder of images as programs: by value, in buckets, counted, and compiled for tpu7x."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import pytest
import torch
from jax.sharding import SingleDeviceSharding

from ml4core.api import Accepted, Deployment, Device, Rejected, VisionShape, VisionWeights
from ml4core_conformance import tiny
from ml4core_conformance.checks.vision import alone, batch
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.stages import EXACT
from ml4core_conformance.oracle.vision import VisionOracle
from ml4core_tpu.backend import TpuBackend
from ml4core_tpu.buckets import image_buckets
from ml4core_tpu.kernels.vision import program
from ml4core_tpu.kernels.vision.stage import VisionPrograms, encoder_of
from ml4core_tpu.programs import Programs, RecompilationWarning

SPEC = tiny.VISION
CELL = SPEC.cell_patches
NOISE = 1e-5
"""fp32, sums in another order."""


@pytest.fixture(scope="module")
def weights() -> VisionWeights:
    return tiny.vision_weights(SPEC, 0, torch.float32)


@pytest.fixture(scope="module")
def given() -> tuple[torch.Tensor, ...]:
    """Three images side by side, and three cells of padding that holds NaN."""
    return batch(SPEC, Draw(0, "images"))


def test_images_are_those_of_the_oracle_whatever_the_padding(
    weights: VisionWeights, given: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by some rows at a time, the last of them ragged."""
    wanted = alone(VisionOracle(SPEC, weights, EXACT), *given).float()
    programs = Programs()
    images = VisionPrograms(SPEC, "float32", programs)
    found = images.call(weights, *given)
    assert found.shape == (len(given[2]) // CELL, SPEC.output_size)
    assert found.isfinite().all()
    assert (found[: len(wanted)] - wanted).abs().max() < NOISE
    fewer = images.call(weights, *(one[:-CELL] for one in given))
    assert torch.equal(fewer, found[:-1])
    assert [one.name for one in programs.made] == ["images, 128 patches"], "one size serves both"
    row = 4 * SPEC.heads * len(given[2])
    monkeypatch.setattr(program, "_SCORE_BYTES", 37 * row)
    form = program.VisionForm(SPEC, "float32")
    patches, places, ids = (one.numpy() for one in given)
    tiled = jax.jit(partial(program.vision_encoder, form))(
        encoder_of(weights), patches, places.astype("int32"), ids
    )
    assert abs(torch.from_dlpack(tiled)[: len(wanted)] - wanted).max() < NOISE


def test_on_a_device_weights_lie_there_and_embeddings_come_to_the_host(
    weights: VisionWeights, given: tuple[torch.Tensor, ...]
) -> None:
    wanted = VisionPrograms(SPEC, "float32", Programs()).call(weights, *given)
    place = SingleDeviceSharding(jax.local_devices()[0])
    images = VisionPrograms(SPEC, "float32", Programs(), place=place)
    assert torch.equal(images.call(weights, *given), wanted)
    held = images._encoder(weights)
    assert {one.sharding for one in jax.tree.leaves(held)} == {place}
    assert images._encoder(weights) is held


def test_layers_of_a_kind_are_one_stack(weights: VisionWeights) -> None:
    """And those of another kind another one."""
    first, second = weights.layers
    (stack,) = encoder_of(weights).stacks
    assert stack["wqkv"].data.shape == (2, *first["wqkv"].shape)
    wo = second["wo"]
    narrow = replace(wo, format="bf16", parts={"data": wo.data.to(torch.bfloat16)})
    found = encoder_of(VisionWeights(weights.top, (first, second, {**second, "wo": narrow})))
    assert [one["wo"].data.shape[0] for one in found.stacks] == [2, 1]


def test_after_a_warm_up_no_image_compiles_and_more_than_one_is_counted(
    weights: VisionWeights, given: tuple[torch.Tensor, ...]
) -> None:
    programs = Programs()
    images = VisionPrograms(SPEC, "float32", programs, warm_up=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cells in (1, 16, 20):
            images.call(weights, *(one[: cells * CELL] for one in given))
    names = {f"images, {patches} patches" for patches in image_buckets(SPEC)}
    assert {one.name for one in programs.made} == names
    assert image_buckets(SPEC) == (64, 128, 144)
    twice = [torch.cat((one, one)) for one in given]
    with pytest.warns(RecompilationWarning, match="images, 256 patches"):
        images.call(weights, *twice)
    assert programs.recompiled == 1


def test_wrong_shapes_are_named(weights: VisionWeights, given: tuple[torch.Tensor, ...]) -> None:
    images = VisionPrograms(SPEC, "float32", Programs())
    with pytest.raises(ValueError, match=r"must be \[T, 48\], \[T, 2\] and \[T\], T a multiple"):
        images.call(weights, *(one[:-1] for one in given))
    with pytest.raises(ValueError, match="no vision encoder"):
        VisionPrograms(None, "float32", Programs()).call(weights, *given)


@pytest.mark.parametrize("eager", [False, True])
def test_a_session_offers_it_but_not_with_enforce_eager(device: Device, eager: bool) -> None:
    model = replace(tiny.model(layers=4), vision=SPEC)
    asked: dict[str, Any] = {"additional_config": {"device": "interpreted"}}
    session = TpuBackend().open(Deployment(model, device, enforce_eager=eager, **asked))
    (found,) = session.providers("vision_encoder", None, VisionShape(64))
    session.close()
    if eager:
        assert isinstance(found, Rejected)
        assert "each op when it is first called" in found.refusals[0].reason
    else:
        assert isinstance(found, Accepted)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="there is no libtpu")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "which", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))]
)
def test_it_compiles_for_tpu7x(which: int) -> None:
    """The encoder of Mistral Large 3, on one device: its layers are one loop, whose scores stay
    within their bound.
    """
    from ml4core_tpu.aot import compile_program, devices_of
    from ml4core_tpu.kernels.layer.aot_cases import nbytes
    from ml4core_tpu.kernels.vision.aot_cases import PATCHES, encoder, image_case

    assert PATCHES == (64, 1024, 12100)
    case = image_case(devices_of("tpu7x:2x2x1")[0], PATCHES[which])
    found = compile_program(case, case.arguments)
    assert not found.collectives
    assert not found.too_large
    held = nbytes(encoder())
    assert held <= found.arguments < 1.05 * held
    # The stack in tiles of the compiler's choice, scores and their odds, and rows.
    assert found.temporaries < held + (3 << 29)
