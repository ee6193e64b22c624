"""Weights are laid out once: a session holds the model, and loading adds one layer to it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import Deployment, Device, Weight
from ml4core.engine.runner import ModelRunner
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from support.live import live_bytes


@pytest.fixture(autouse=True)
def only_new_objects() -> Iterator[None]:
    """What exists before a test is out of the collector's sight."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", params=["bf16", "fp8_block"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laid-out") / "m"
    # Layers that weigh more than the embedding, so that one more of them would show.
    return make_seeded(
        folder, "micro", format=request.param, vocab=320, experts=8, expert_width=512, layers=6
    )


def cuda(deployment: Deployment) -> Any:
    from ml4core_cuda.session import CudaSession

    return CudaSession(deployment)


def rocm(deployment: Deployment) -> Any:
    from ml4core_rocm.session import RocmSession

    return RocmSession(deployment)


def storages(weights: Mapping[str, Any]) -> dict[int, int]:
    """Bytes by storage."""
    found = {}
    for value in weights.values():
        for part in value.parts.values() if isinstance(value, Weight) else (value,):
            storage = part.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


@pytest.mark.parametrize(
    ("open_session", "device"),
    [
        (cuda, Device("real", "GPU", "sm_90", "meta")),
        (rocm, Device("fake", "GPU", "gfx950", "meta")),
    ],
    ids=["cuda", "rocm"],
)
def test_memory_peaks_at_the_model_and_one_layer(
    folder: Path, open_session: Callable[[Deployment], Any], device: Device
) -> None:
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    deployment = Deployment(spec, device, dtype="bfloat16", max_num_seqs=2, max_model_len=128)
    session = open_session(deployment)
    peak, sizes = 0, []

    def measure(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, live_bytes())

    class Watched:
        """Looks where a layer is there twice: as it was read, and laid out."""

        def prepare_weights(self, weights: Any, layer: Any, part: Any) -> Any:
            sizes.append(sum(storages(weights).values()))
            prepared = session.prepare_weights(weights, layer, part)
            measure(0, 0)
            return prepared

    runner: Any = ModelRunner.__new__(ModelRunner)  # its loading alone
    runner.session = Watched()
    read = load_layers(checkpoint, spec, torch.bfloat16, progress=measure)
    top, layers = runner._laid_out(read, len(spec.layers), "decoder")
    model = sum({k: v for one in (top, *layers) for k, v in storages(one).items()}.values())
    largest = max(info.nbytes for info in checkpoint.tensors.values())
    beside = live_bytes() - model
    assert beside < largest, "nothing but the model is kept"
    assert model + min(sizes[2:]) // 2 < peak, "the measure sees what is held"
    assert peak <= model + max(sizes) + 2 * largest
    session.close()
