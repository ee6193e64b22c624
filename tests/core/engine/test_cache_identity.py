"""What a cache is of: names of blocks that outlive a process, and the list of all caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import Deployment, Refused
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.engine.args import EngineArgs
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.cache_identity import cache_root
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.llm import open_engine
from ml4core.engine.request import Request
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

SPEC = build_model_spec(PRESETS["micro"].params())
LAYOUTS = {"latent": latent_layout("bf16", 512, 64), "index": index_layout("planar_f32", 128)}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for file in made:
        file.write_bytes(b"weights")
    return made


@pytest.fixture
def deployment() -> Deployment:
    from ml4core.cpu.backend import CpuBackend

    return Deployment(SPEC, CpuBackend().probe().devices[0], "bfloat16", "bf16", "planar_f32")


def stretched(deployment: Deployment) -> Deployment:
    """With another factor of the rotary embedding."""
    first = next(layer for layer in SPEC.layers if layer.rope is not None)
    assert first.rope is not None
    rope = replace(first.rope, theta=2 * first.rope.theta)
    layers = tuple(replace(one, rope=rope) if one is first else one for one in SPEC.layers)
    return replace(deployment, model=replace(SPEC, layers=layers))


CHANGES: dict[str, Callable[[Deployment], Deployment]] = {
    "page size": lambda d: replace(d, block_size=16),
    "dtype": lambda d: replace(d, dtype="float32"),
    "weights": lambda d: replace(d, weight_formats=frozenset({"fp8_block"})),
    "tensor parallel": lambda d: replace(d, tensor_parallel_size=2),
    "context parallel": lambda d: replace(d, decode_context_parallel_size=2),
    "device": lambda d: replace(d, device=replace(d.device, arch="other")),
    "form of attention": lambda d: replace(d, attention_config={"mla_form": "absorbed"}),
    "rope": stretched,
}


@pytest.mark.parametrize("change", CHANGES)
def test_blocks_of_another_deployment_are_misses(
    deployment: Deployment, files: list[Path], change: str
) -> None:
    """B054: one factor at a time."""
    ours = cache_root(deployment, LAYOUTS, files)
    assert cache_root(deployment, dict(reversed(LAYOUTS.items())), files[::-1]) == ours
    assert_foreign(ours, cache_root(CHANGES[change](deployment), LAYOUTS, files))


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "e4m3", "e4m3fnuz", "fp32"])
def test_blocks_of_another_layout_or_flavour_are_misses(
    deployment: Deployment, files: list[Path], layout: str
) -> None:
    """B054."""
    roots = {
        cache_root(deployment, LAYOUTS | {"latent": latent_layout(one, 512, 64)}, files)
        for one in ("bf16", layout)
    }
    assert len(roots) == 2
    assert_foreign(*roots)


def test_blocks_of_weights_that_have_changed_are_misses(
    deployment: Deployment, files: list[Path]
) -> None:
    """B054: also in place, and of one length."""
    before = cache_root(deployment, LAYOUTS, files)
    stat = files[0].stat()
    files[0].write_bytes(b"WEIGHTS")
    os.utime(files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert_foreign(before, cache_root(deployment, LAYOUTS, files))
    assert_foreign(before, cache_root(deployment, LAYOUTS, files[:1]))


def assert_foreign(ours: bytes, theirs: bytes) -> None:
    """A cache that one filled has nothing for the other, and all of it for itself."""
    group = KVGroup("latent")
    pools = {"latent": BlockPool("latent", 20)}

    def request() -> Request:
        return Request("r", list(range(33)), SamplingParams(), limit=100)

    first = KVManager([group], pools, 8, step_rows=64, caching=True, root=ours)
    made = request()
    assert first.allocate(made, 33)
    made.num_confirmed = 33
    first.cache(made)
    assert first.find_hit(request()).tokens == 32
    other = KVManager([group], pools, 8, step_rows=64, caching=True, root=theirs)
    assert other.find_hit(request()).tokens == 0


def test_an_engine_names_its_blocks_by_what_they_are_of(tmp_path: Path) -> None:
    """B054: on one folder, by its flags."""
    folder = make_seeded(tmp_path / "m", "micro", layers=4, vocab=320)
    choice, roots = select("cpu"), []
    for flags in ({}, {}, {"kv_cache_dtype": "bfloat16"}, {"block_size": 16}):
        args = EngineArgs(str(folder), backend="cpu", **flags)
        engine = open_engine(args, choice=choice, tokens_each=64)
        roots.append(engine.core.kv._root)
        engine.close()
    assert roots[0] == roots[1]
    assert len(set(roots)) == 3


def test_every_cache_is_listed_by_kind_with_row_bytes_and_owners(tmp_path: Path) -> None:
    """B048: what saves or moves caches must not count attention layers. None does so yet, and one
    that is asked for is refused by name.
    """
    folder = make_seeded(tmp_path / "m", "micro")
    choice = select("cpu")
    args = EngineArgs(str(folder), backend="cpu", kv_cache_dtype="fp8_ds_mla")
    engine = open_engine(args, choice=choice, tokens_each=64)
    spec, told = engine.deployment.model, engine.report()["kv"]
    assert told["owners"] == {"latent": 7, "index": len(spec.index_owners)}
    assert told["row_bytes"] == {"latent": 656, "index": 132}
    caches: dict[str, Any] = {
        "latent": engine.runner.kv.latent,
        "index": engine.runner.kv.index_keys,
    }
    assert {kind: tuple(by_owner) for kind, by_owner in caches.items()} == engine.kv_plan.owners
    assert len(spec.layers) == 8 > 7 > len(spec.index_owners)
    assert told["bytes"] == sum(
        cache.nbytes for by_owner in caches.values() for cache in by_owner.values()
    )
    engine.close()
    with pytest.raises(Refused, match="--kv-transfer-config: KV transfer and offload has not"):
        open_engine(replace(args, kv_transfer_config={"kv_connector": "mine"}), choice=choice)
