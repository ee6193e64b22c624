"""The forward against an independent one in float64, for every mixture of traits that a table can
hold.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.formats import fp8_block
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded_config import PRESETS, SeededConfig
from ml4core.models.tensor_table import Expected, expected_tensors
from ml4core.models.tensors import load_model_spec

from .reference import Reference

SMALL = replace(PRESETS["micro"], vocab=128, index_head_dim=128, topk=9, expert_width=128)
LORA = replace(PRESETS["lora_indexer"], hidden=128, vocab=128, topk=9)
LENGTH = 40
BOUND = 3e-5


def params(base: SeededConfig = SMALL, **changes: Any) -> dict[str, Any]:
    """A params.json with some keys changed; a block is merged, None drops a key."""
    made = base.params()
    for key, value in changes.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = {**made[key], **value} if isinstance(value, dict) else value
    return made


def no_rope(rope_dim: int) -> dict[str, Any]:
    """Every layer a NoPE layer; two read the latent of layer 3."""
    made = params(nope_every=1, lerope=None, indexer={"topk_pattern": "F" * SMALL.layers})
    made |= {"kv_sharing": {"5": 3, "7": 3}, "qk_rope_head_dim": rope_dim}
    return made | {"head_dim": SMALL.nope_dim + rope_dim}


def ssmax(kind: str, **block: Any) -> dict[str, Any]:
    made = params(llama_4_scaling=None)
    return made | {"ssmax": {"kind": kind, **block}}


ODD = replace(
    SMALL,
    hidden=123,
    heads=3,
    v_dim=29,
    nope_dim=31,
    nope_layer_dim=37,
    expert_width=77,
    dense_width=101,
    index_heads=3,
    index_head_dim=65,
    kv_lora_rank=129,
)
NOPE_SHARER = {"topk_pattern": "FFSFSSSF", "nope_owners": False}

CASES: Mapping[str, dict[str, Any]] = {
    "all traits": params(),
    "odd widths": params(ODD),
    "query LoRA": params(LORA),
    "no indexer": params(replace(PRESETS["dense_mla"], hidden=128, vocab=128)),
    "no rope dims": no_rope(0),
    "no rope layers": no_rope(64),
    "a NoPE sharer behind a NoPE owner": params(
        nope_every=None, indexer=NOPE_SHARER, kv_sharing={"4": 3, "7": 3}
    )
    | {"nope_layers": [3, 4, 5, 7]},
    "YaRN scale": params(yarn={"apply_scale": True}),
    "llama4": params(replace(SMALL, learned_scaling=False, yarn_original=7)),
    "pow": ssmax("pow", beta=0.3, original_max_position_embeddings=8, n="topk", per_head=True),
    "floor": ssmax("floor", beta=0.4, original_max_position_embeddings=6, per_head=False),
    "log without tensors": ssmax("log", scale=0.4, per_head=False),
    "half-split": params(rope_interleave=False, indexer={"rope_interleave": False}),
    "top-k 1": params(replace(SMALL, topk=1)),
    "top-k above the context": params(replace(SMALL, topk=500)),
    "one expert": params(replace(SMALL, experts=1, experts_per_token=1)),
    "every expert": params(replace(SMALL, experts=3, experts_per_token=3)),
    "no shared expert": params(replace(SMALL, shared_experts=0)),
    "two shared experts": params(replace(SMALL, shared_experts=2)),
    "no renormalisation": params(moe={"renorm_strategy": "NONE", "routed_scale": 2.5}),
    "every other layer MoE": params(moe={"route_every_n": 2}),
    "tied embeddings": params(tied_embeddings=True),
}


def write(folder: Path, content: dict[str, Any], fp8: bool = False) -> Path:
    """A checkpoint of random weights."""
    with CheckpointWriter(folder) as writer:
        writer.add_json("params.json", json.loads(json.dumps(content)))
        for entry in expected_tensors(build_model_spec(content)).values():
            if not entry.used:
                continue
            values = draw(entry)
            if fp8 and entry.kind == "matrix":
                code, scale = fp8_block.quantize_weight(values)
                writer.add(entry.name, code.view(torch.float8_e4m3fn))
                writer.add(entry.name + "_scale", scale)
            else:
                writer.add(entry.name, values)
    return folder


def draw(entry: Expected) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(entry.name.encode()))
    noise = torch.randn(entry.shapes[0], generator=generator)
    if entry.role == "embedding":
        return noise
    if entry.kind != "vector":
        return noise * entry.shapes[0][-1] ** -0.5
    return (0.0 if entry.role.endswith("bias") else 1.0) + 0.2 * noise


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    worst = ((found - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max().item()
    assert worst <= BOUND


@pytest.fixture
def ids(prompt):
    return [token % 128 for token in prompt(LENGTH)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The checkpoint of a case, written once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write(tmp_path_factory.mktemp("case") / "m", CASES[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_every_mixture(make_rig, folder_of, ids, name):
    folder = folder_of(name)
    wanted = Reference(folder).logits(ids)
    rig = make_rig(folder=folder, tokens=64)
    check(rig.logits(ids), wanted)
    check(rig.logits(ids, 17, 16, 1), wanted)


@pytest.mark.parametrize("form", ["absorbed", "unabsorbed"])
@pytest.mark.parametrize("base", [SMALL, replace(ODD, hidden=200)], ids=["even", "odd"])
def test_fp8_blocks_whole_and_ragged(make_rig, tmp_path, ids, base, form):
    folder = write(tmp_path / "m", params(base), fp8=True)
    rig = make_rig(folder=folder, tokens=64, form=form)
    check(rig.logits(ids, 23, 1), Reference(folder).logits(ids))


@pytest.mark.parametrize("form", ["absorbed", "unabsorbed"])
def test_a_layer_without_a_selection_between_an_owner_and_its_sharers(
    make_rig, tmp_path, ids, form
):
    """It attends to every key, and the sharers behind it still use their owner's selection."""
    folder = write(tmp_path / "m", params())
    spec = load_model_spec(Checkpoint.open(folder))
    assert [layer.topk_source for layer in spec.layers[4:7]] == [4, 4, 4]
    layers = list(spec.layers)
    layers[5] = replace(layers[5], topk_source=None)
    rig = make_rig(folder=folder, spec=replace(spec, layers=tuple(layers)), tokens=64, form=form)
    check(rig.logits(ids, 30, 1), Reference(folder, dense_layers=(5,)).logits(ids))


def test_a_sharer_uses_the_owner_that_the_table_names(make_rig, tmp_path, ids):
    folder = write(tmp_path / "m", params())
    spec = load_model_spec(Checkpoint.open(folder))
    layers = list(spec.layers)
    layers[6] = replace(layers[6], topk_source=3)  # not the nearest, which is 4
    rig = make_rig(folder=folder, spec=replace(spec, layers=tuple(layers)), tokens=64)
    used: list[torch.Tensor] = []
    sparse = rig.runner.ops["sparse_mla"]

    def recording(q, cache, slots, lens, scale):
        used.append(slots)
        return sparse(q, cache, slots, lens, scale)

    context = rig.runner._context
    rig.runner._context = replace(context, ops={**context.ops, "sparse_mla": recording})
    rig.logits(ids)
    assert torch.equal(used[6], used[3])
    assert torch.equal(used[5], used[4])
    assert not torch.equal(used[4], used[3])


STORED = {  # layout and per-tensor scale: the relative step of its latent, of its rope part
    ("bf16", None): (2**-8, 2**-8),
    ("fp8_ds_mla", None): (2**-3, 2**-8),
    ("e4m3", 1.0): (2**-3, 2**-3),
    ("e4m3", 0.37): (2**-3, 2**-3),
    ("e4m3fnuz", 2.0): (2**-3, 2**-3),
}


@pytest.mark.parametrize("form", ["absorbed", "unabsorbed"])
@pytest.mark.parametrize("model", ["all traits", "no rope dims", "no rope layers", "no indexer"])
@pytest.mark.parametrize(("kv", "scale"), STORED)
def test_what_a_cache_gives_back_is_what_attention_sees(
    make_rig, folder_of, ids, model, kv, scale, form
):
    """Given the rows of the cache, the numbers are exact, however many steps wrote them."""
    folder = folder_of(model)
    rig = make_rig(folder=folder, kv=kv, tokens=64, form=form)
    caches = rig.runner.kv.latent
    if scale is not None:
        for cache in caches.values():
            cache.scale.fill_(scale)
    sequence = rig.sequence(ids)
    found = [rig.step((sequence, rows), all_logits=True).logits for rows in (23, 1, 16)]
    pages = torch.tensor(sequence.pages["latent"])
    slots = (pages[:, None] * 16 + torch.arange(16)).flatten()[:LENGTH].int()
    rank = rig.spec.layers[0].kv_lora_rank

    class Stored(Reference):
        def stored(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
            read = rig.runner.ops["gather_kv"](caches[layer], slots).double()
            read, tail = read[:, : rows.shape[1]], read[:, rows.shape[1] :]
            assert tail.eq(0).all()
            for part, step in zip(
                (slice(0, rank), slice(rank, None)), STORED[kv, scale], strict=True
            ):
                off = (read[:, part] - rows[:, part]).abs()
                assert (off <= step * rows[:, part].abs() + 0.01).all()
            return read

    check(torch.cat(found), Stored(folder).logits(ids))
