"""A plan against what is allocated: cache bytes equal, weights to the byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache, Weight
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec, validate
from ml4core.models.weights import load_layers
from ml4core.planning.model import checkpoint_model
from ml4core.planning.plan import PlanOptions, make_plan
from ml4core.planning.ranks import Ranks
from ml4core.planning.weights import kept
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

FORMATS = ("bf16", "fp8_block")


@pytest.fixture(scope="module", params=[("micro", f) for f in FORMATS] + [("tiny", "fp8_block")])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    preset, format = request.param
    folder = tmp_path_factory.mktemp("planned") / f"{preset}_{format}"
    return make_seeded(folder, preset, format=format)


@pytest.fixture(scope="module")
def choice() -> Any:
    return select("cpu")


@pytest.fixture
def start(folder: Path, choice: Any) -> Iterator[Any]:
    opened: list[Engine] = []

    def start(**flags: Any) -> Engine:
        args = EngineArgs(str(folder), backend="cpu", **flags)
        opened.append(open_engine(args, choice=choice, tokens_each=64))
        return opened[-1]

    yield start
    for engine in opened:
        engine.close()


def nbytes(weights: Mapping[str, Tensor | Weight]) -> int:
    """Of one mapping; tied ones count once."""
    storages = {}
    for value in weights.values():
        for part in value.parts.values() if isinstance(value, Weight) else (value,):
            storages[part.data_ptr()] = part.numel() * part.element_size()
    return sum(storages.values())


def planned(folder: Path, decoded: bool, dtype: str, **flags: Any) -> Any:
    model = checkpoint_model(Checkpoint.open(folder))
    args = EngineArgs(str(folder), dtype=dtype, **flags)
    return make_plan(model, args, PlanOptions(decoded=decoded))


def test_stored_bytes_are_those_of_the_files(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    assert checkpoint_model(checkpoint).table.stored == validate(checkpoint, spec).nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_as_handed_to_a_backend(folder: Path, dtype: str) -> None:
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    real = sum(nbytes(one) for _, one in load_layers(checkpoint, spec, getattr(torch, dtype)))
    table = checkpoint_model(checkpoint).table
    parts = table.by_part(Ranks(), kept("fp32" if dtype == "float32" else "bf16"))
    assert sum(part.rank for part in parts.values()) == real


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_an_engine_holds(start: Any, folder: Path, dtype: str) -> None:
    weights = start(dtype=dtype).runner.weights
    real = nbytes(weights.top) + sum(map(nbytes, weights.layers))
    assert planned(folder, True, dtype).weight_bytes == real


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_cache_dtype": "fp8_ds_mla", "block_size": 64}, "fp8_ds_mla"),
        ({"kv_cache_dtype": "bfloat16", "block_size": 16}, "bf16"),
        ({"kv_cache_dtype": "float32", "block_size": 7}, "fp32"),
    ],
)
def test_b027_caches_have_the_planned_bytes_and_every_token_can_be_held(
    start: Any, folder: Path, flags: dict[str, Any], words: str
) -> None:
    flags = {**flags, "kv_cache_memory_bytes": 3_000_000}
    engine = start(**flags)
    plan = planned(folder, True, "float32", max_num_seqs=1, max_model_len=64, **flags)
    state = engine.runner.kv
    caches: list[KVCache] = [*state.latent.values(), *state.index_keys.values()]
    assert plan.layout == words
    assert sum(cache.nbytes for cache in caches) == plan.pools.nbytes == engine.kv_plan.nbytes
    assert plan.pools.nbytes <= 3_000_000
    assert engine.kv_plan.tokens == plan.pools.tokens
    for group, pool in engine.runner.pools.items():
        pages = pool.allocate(pool.free_pages)
        assert len(pages) * flags["block_size"] == plan.pools.tokens, group


def test_consumers_have_no_cache(start: Any) -> None:
    engine = start()
    spec = engine.deployment.model
    assert tuple(engine.runner.kv.latent) == spec.kv_owners
    assert tuple(engine.runner.kv.index_keys) == spec.index_owners
