"""The shapes that are trained: a params.json, read by the project's own definitions."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ml4core.api import DraftSpec, ModelSpec
from ml4core.models.dspark import draft_spec
from ml4core.models.layer_table import build_model_spec

TINY = Path(__file__).with_name("ml4-tiny.json")


@dataclass(frozen=True)
class Shape:
    """A model to train. `params` is the content of its params.json."""

    params: dict[str, Any]

    @cached_property
    def model(self) -> ModelSpec:
        return build_model_spec(self.params, name="ml4-tiny")

    @cached_property
    def draft(self) -> DraftSpec:
        return draft_spec(self.model)


def load_shape(name: str) -> Shape:
    """`tiny`, `dense` (the baseline), or the path of a params.json."""
    if name == "tiny":
        return Shape(json.loads(TINY.read_text()))
    if name == "dense":
        return Shape(dense_params(json.loads(TINY.read_text())))
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"shape {name!r}: neither 'tiny', 'dense', nor the path of a params.json")
    return Shape(json.loads(path.read_text()))


def dense_params(params: dict[str, Any]) -> dict[str, Any]:
    """The same model with a dense feed-forward as wide as what a token meets of the experts."""
    dense = deepcopy(params)
    moe = dense.pop("moe")
    active = moe["num_experts_per_tok"] * moe["expert_hidden_dim"]
    dense["hidden_dim"] = active + moe["shared_expert_hidden_dim"]
    return dense
