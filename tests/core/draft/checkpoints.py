"""A small target with a drafter, as params.json and as a checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ml4core.api import ModelSpec
from ml4core.models.checkpoint import CheckpointWriter
from ml4core.models.dspark import draft_spec
from ml4core.models.dspark_weights import expected_draft_tensors
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded_config import PRESETS
from ml4core.models.tensor_table import expected_tensors

# No two axes of one matrix are equal, and the drafter's differ from the target's.
TARGET = replace(
    PRESETS["tiny"],
    layers=4,
    hidden=48,
    heads=2,
    nope_dim=6,
    rope_dim=8,
    v_dim=10,
    kv_lora_rank=32,
    nope_every=None,
    index_heads=0,
    dense_width=40,
    experts=2,
    experts_per_token=1,
    expert_width=16,
    vocab=80,
)
MTP: dict[str, Any] = {
    "target_layers": [0, 3],
    "n_layers": 2,
    "depth": 3,
    "sliding_window": 6,
    "markov_rank": 5,
    "n_heads": 3,
    "hidden_dim": 28,
}


def params_of(**mtp: Any) -> dict[str, Any]:
    """params.json with a drafter; a value of `...` takes a key of its block out."""
    block = {key: value for key, value in (MTP | mtp).items() if value is not ...}
    return TARGET.params() | {"mtp": copy.deepcopy(block)}


def target_of(**mtp: Any) -> ModelSpec:
    return build_model_spec(params_of(**mtp))


def tensors_of(params: Mapping[str, Any], *, own_frequencies: bool = False) -> dict[str, Tensor]:
    """Random bf16 tensors of target and drafter, by name."""
    model = build_model_spec(params)
    draft = expected_draft_tensors(draft_spec(model), own_frequencies)
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, entry in (expected_tensors(model) | draft).items():
        shape = entry.shapes[0]
        values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if entry.kind == "vector":
            values = 1 + 0.1 * values
        made[name] = values.to(torch.bfloat16)
    return made


def write(folder: Path, params: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    with CheckpointWriter(folder) as writer:
        writer.add_json("params.json", json.loads(json.dumps(params)))
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return folder
