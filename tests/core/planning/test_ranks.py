"""A plan's bytes of a rank are those that the rank is handed, to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.dspark import draft_spec, with_drafter
from ml4core.models.dspark_weights import expected_draft_tensors, load_draft
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded import make_seeded
from ml4core.models.shards import Shard
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from ml4core.planning.model import checkpoint_model
from ml4core.planning.ranks import Ranks
from ml4core.planning.weights import kept

# Four ranks have whole blocks; 320 tokens are no multiple of what each has of them.
DIMS: dict[str, Any] = {
    "layers": 4,
    "hidden": 128,
    "heads": 8,
    "nope_dim": 64,
    "nope_layer_dim": 128,
    "v_dim": 64,
    "kv_lora_rank": 128,
    "topk": 16,
    "experts": 8,
    "expert_width": 512,
    "dense_width": 512,
    "vocab": 320,
}


MTP: dict[str, Any] = {
    "n_layers": 2,
    "depth": 3,
    "target_layers": [0, 2, 3],
    "sliding_window": 12,
    "markov_rank": 32,
    "hidden_dim": 192,
}


def handed(layers: Iterable[tuple[Any, Mapping[str, Tensor | Weight]]]) -> int:
    total = 0
    for _, weights in layers:
        for name, value in weights.items():
            parts = value.parts.values() if isinstance(value, Weight) else (value,)
            if not name.endswith("input_scale"):
                total += sum(part.numel() * part.element_size() for part in parts)
    return total


def planned(checkpoint: Checkpoint, *parts: str, **sizes: Any) -> int:
    """Of these parts, or of all."""
    found = checkpoint_model(checkpoint).table.by_part(Ranks(**sizes), kept("bf16"))
    return sum(part.rank for name, part in found.items() if not parts or name in parts)


@pytest.mark.parametrize("format", ["bf16", "fp8_block", "nvfp4_ct", "mxfp4"])
def test_bytes_of_a_rank(tmp_path: Path, format: Any) -> None:
    checkpoint = Checkpoint.open(make_seeded(tmp_path / "m", format=format, **DIMS))
    spec = load_model_spec(checkpoint)
    for size in (1, 2, 4):
        for whole in (False, True):
            want = planned(checkpoint, tp=size, expert_parallel=whole)
            ep = size if whole else 1
            for rank in range(size):
                shard = Shard(rank, size, rank % ep, ep)
                found = load_layers(checkpoint, spec, torch.bfloat16, shard=shard)
                assert handed(found) == want, (size, whole)


@pytest.fixture
def drafting(tmp_path: Path) -> Checkpoint:
    source = Checkpoint.open(make_seeded(tmp_path / "m", format="bf16", **DIMS))
    params = {**json.loads((source.path / "params.json").read_text()), "mtp": MTP}
    draft = draft_spec(build_model_spec(params))
    with CheckpointWriter(tmp_path / "drafting") as writer:
        writer.add_json("params.json", params)
        for name in source.tensors:
            writer.add(name, source.read(name))
        for name, entry in expected_draft_tensors(draft, own_frequencies=False).items():
            writer.add(name, torch.ones(entry.shapes[0], dtype=torch.bfloat16))
    return Checkpoint.open(tmp_path / "drafting")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_of_a_drafter(drafting: Checkpoint, size: int) -> None:
    draft = with_drafter(drafting, load_model_spec(drafting)).draft
    assert draft is not None
    assert handed(load_draft(drafting, draft)) == planned(drafting, "drafter", tp=size)
