"""Seeded checkpoints: the large model's pattern, the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS
from ml4core.models.seeded_values import normal
from ml4core.models.tensors import load_model_spec, validate

SMALL: dict[str, Any] = {"preset": "micro", "layers": 4, "vocab": 320, "experts": 2}


def digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
    }


def test_pattern_of_tiny() -> None:
    spec = build_model_spec(PRESETS["tiny"].params())
    assert len(spec.layers) == 12
    assert [layer.index for layer in spec.layers if layer.rope is None] == [3, 7, 11]
    assert [layer.kv_source for layer in spec.layers] == [0, 1, 2, 3, 4, 5, 6, 3, 8, 9, 10, 3]
    assert spec.index_owners == (0, 1, 3, 4, 7, 8, 11)
    assert [layer.topk_source for layer in spec.layers] == [0, 1, 1, 3, 4, 4, 4, 7, 8, 8, 8, 11]
    assert [layer.moe is None for layer in spec.layers] == [True] + [False] * 11
    first = spec.layers[1]
    assert first.moe is not None
    assert (first.moe.experts, first.moe.topk, first.moe.shared_width) == (16, 4, 128)
    assert (first.kv_lora_rank, first.rope_dim, first.heads) == (512, 64, 8)
    assert first.indexer is not None
    assert (first.indexer.head_dim, first.indexer.topk) == (128, 256)
    assert (first.ssmax.kind, first.ssmax.per_head, first.ssmax.bias) == ("log", True, True)
    assert (first.indexer.ssmax.kind, first.indexer.ssmax.per_head) == ("log", True)
    assert first.rope is not None
    assert (first.rope.lerope, first.rope.yarn is None) == ("multiplier", False)
    assert spec.vocab_size == 8192
    # Every kind of layer that the large model has.
    assert len({layer.kind for layer in spec.layers}) == 5
    # What is held by every layer can't tell one from another.
    assert spec.layers[0].nope_dim != spec.layers[3].nope_dim


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("format", ["bf16", "fp32", "fp8_block"])
def test_presets_load(tmp_path: Path, preset: str, format: Any) -> None:
    folder = make_seeded(
        tmp_path / "m", preset, format=format, layers=4, vocab=320, experts=4, hidden=128
    )
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    assert spec.layers == build_model_spec(json.loads((folder / "params.json").read_text())).layers
    report = validate(checkpoint, spec)
    assert report.nbytes == checkpoint.nbytes
    assert format in report.formats
    assert not spec.assumptions


def test_fp8_is_in_most_matrices(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "m", format="fp8_block", **SMALL)
    checkpoint = Checkpoint.open(folder)
    plain = {
        name.split(".", 2)[-1]
        for name, matrix in validate(checkpoint, load_model_spec(checkpoint)).matrices.items()
        if matrix.format != "fp8_block"
    }
    assert plain == {"tok_embeddings", "output", "gate", "attention.indexer.weights_proj"}


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, second, other = (
        digests(make_seeded(tmp_path / str(n), seed=seed, **SMALL))
        for n, seed in enumerate((7, 7, 8))
    )
    assert first == second
    assert first["consolidated.safetensors"] != other["consolidated.safetensors"]
    assert first["params.json"] == other["params.json"]


def test_bytes_are_those_of_every_other_machine() -> None:
    # Frozen: another value means that published checkpoints can no longer be made again.
    values = normal(0, "layers.0.attention.wq.weight", (3, 5), 0.5, 1.0)
    digest = hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest()
    assert digest == "dce0833ca25bbbea523d15008c12f55f76909ca787b6762224f8d983118ab9b1"


def test_the_generator_is_philox() -> None:
    # First words for key 0 and counter 0, by the generator's published test vectors, whose
    # counter numpy advances before use.
    words = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4)
    assert [f"{word:016x}" for word in words] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]


def test_values_are_nearly_normal() -> None:
    values = normal(3, "x", (200_000,), 2.0, -1.0).double()
    assert abs(float(values.mean()) + 1.0) < 0.02
    assert abs(float(values.std()) - 2.0) < 0.02
    assert float((values + 1.0).abs().max()) < 3.47 * 2.0
    within = float(((values + 1.0).abs() < 2.0).double().mean())
    assert abs(within - 0.6827) < 0.02


def test_each_tensor_has_its_own_values() -> None:
    values = [normal(seed, name, (64,), 1.0) for seed in (0, 1) for name in ("a", "b")]
    for i, one in enumerate(values):
        assert not any(torch.equal(one, other) for other in values[i + 1 :])
    assert torch.equal(normal(0, "a", (8,), 1.0), values[0][:8])  # a larger tensor only goes on


def test_shards(tmp_path: Path) -> None:
    whole = make_seeded(tmp_path / "a", **SMALL)
    parts = make_seeded(tmp_path / "b", max_shard_bytes=200_000, **SMALL)
    assert len(list(parts.glob("consolidated-*.safetensors"))) > 3
    assert (parts / "consolidated.safetensors.index.json").is_file()
    one, many = Checkpoint.open(whole), Checkpoint.open(parts)
    assert one.tensors.keys() == many.tensors.keys()
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.tensors)


def test_tokenizer_comes_along(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "m", **SMALL)
    assert sorted(file.name for file in folder.iterdir()) == [
        "consolidated.safetensors",
        "params.json",
        "tekken.json",
    ]
    tekken = json.loads((folder / "tekken.json").read_text("utf-8"))
    assert tekken["config"]["default_vocab_size"] == PRESETS["tiny"].vocab


def test_overrides(tmp_path: Path) -> None:
    folder = make_seeded(
        tmp_path / "m", layers=8, hidden=128, topk=16, experts=4, experts_per_token=2, vocab=320
    )
    spec = load_model_spec(Checkpoint.open(folder))
    assert (len(spec.layers), spec.hidden_size) == (8, 128)
    assert spec.layers[0].indexer is not None
    assert spec.layers[0].indexer.topk == 16
    assert [layer.kv_source for layer in spec.layers if not layer.owns_kv] == [3]


def test_a_model_too_small_for_nope_layers(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "m", "micro", layers=2, vocab=320)
    spec = load_model_spec(Checkpoint.open(folder))
    assert [layer.kind for layer in spec.layers] == [
        "rope+kv_owner+index_owner+dense",
        "rope+kv_owner+index_owner+moe",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"preset": "huge"}, "preset 'huge'; known are tiny, micro"),
        ({"format": "int4"}, "format 'int4'; known are bf16, fp32, fp8_block"),
        ({"width": 3}, r"unknown dimensions \['width'\]; known are layers, hidden"),
        ({"experts": 2}, "num_experts_per_tok: 4; at most moe.num_experts, 2"),
        ({"rope_dim": 63}, "63 is odd"),
        ({"hidden": 0}, "dim: 0; must be 1 or more"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_seeded(tmp_path / "m", **arguments)
    assert not (tmp_path / "m").exists()


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        make_seeded(tmp_path, **SMALL)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    first = make_seeded(tmp_path, overwrite=True, **SMALL)
    again = digests(make_seeded(tmp_path, overwrite=True, seed=1, **SMALL))
    assert digests(first) == again
    assert len(Checkpoint.open(tmp_path).tensors) > 50


def test_a_failure_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    # The tokenizer is written last, once every tensor is there.
    monkeypatch.setattr("ml4core.models.checkpoint_writer.CheckpointWriter._write_file", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        make_seeded(tmp_path / "m", **SMALL)
    assert not (tmp_path / "m").exists()


def test_presets_differ_where_they_say(tmp_path: Path) -> None:
    relative = build_model_spec(PRESETS["lora_indexer"].params())
    assert relative.layers[0].indexer is not None
    assert relative.layers[0].indexer.query_input == "q_lora"
    assert not relative.layers[0].indexer.rope_interleaved
    assert not relative.layers[0].indexer.query_norm
    dense = build_model_spec(replace(PRESETS["dense_mla"], q_lora_rank=None).params())
    assert all(layer.topk_source is None for layer in dense.layers)
    assert dense.layers[0].ssmax.kind == "llama4"
