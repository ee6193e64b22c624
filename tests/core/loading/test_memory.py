"""Loading holds one layer at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ml4core.api import ModelSpec, Weight
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import Weights, load_layers
from support.live import live_bytes


@pytest.fixture(autouse=True)
def only_new_objects() -> Iterator[None]:
    """Take what exists before a test out of the collector's sight: the walks get short."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def nbytes(weights: Weights) -> int:
    return sum(value.nbytes for value in weights.values())


def load(folder: Path, keep: bool) -> tuple[int, list[int], int, ModelSpec]:
    """The peak of live bytes, the bytes of each layer, and of the largest tensor."""
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    peak, sizes, kept = 0, [], []

    def measure(done: int, total: int) -> None:
        nonlocal peak
        peak = max(peak, live_bytes())

    layers = load_layers(checkpoint, spec, torch.float32, progress=measure)
    for _, weights in layers:
        sizes.append(nbytes(weights))
        if keep:
            kept.append(weights)
        del weights
    largest = max(info.nbytes for info in checkpoint.tensors.values())
    return peak, sizes, largest, spec


@pytest.fixture(scope="module", params=["bf16", "fp8_block"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "m"
    # Layers that weigh more than the embedding, so that one more of them would show.
    return make_seeded(
        folder, "micro", format=request.param, vocab=320, experts=8, expert_width=512, layers=6
    )


def test_peak_is_one_layer(folder: Path) -> None:
    peak, sizes, largest, _ = load(folder, keep=False)
    assert peak <= max(sizes) + 2 * largest
    experts = sizes[2:]  # behind the outer weights and the dense layer
    assert peak < 2 * min(experts)  # two layers at once would be seen


def test_layers_that_the_caller_keeps_are_his(folder: Path) -> None:
    # The measure works: it sees what is held.
    peak, sizes, largest, _ = load(folder, keep=True)
    assert sum(sizes) - largest <= peak <= sum(sizes) + 2 * largest


def test_halves_of_wkv_b_do_not_keep_the_whole(tmp_path: Path) -> None:
    # With one head a slice would be contiguous, and a view.
    folder = make_seeded(tmp_path / "m", "micro", heads=1, index_heads=1, layers=4)
    checkpoint = Checkpoint.open(folder)
    for layer, weights in load_layers(checkpoint, load_model_spec(checkpoint)):
        if layer is None:
            continue
        for name in ("w_uk", "w_uv"):
            weight = weights[name]
            assert isinstance(weight, Weight)
            assert weight.data.untyped_storage().nbytes() == weight.nbytes
            assert weight.data.is_contiguous()
