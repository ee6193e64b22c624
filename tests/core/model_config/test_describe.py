"""Sizes that must come out of the table, and the data that `ml4 inspect` prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ml4core.api import ModelSpec
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.models.describe import RowBytes, describe, kv_bytes_per_token, parameters
from ml4core.models.layer_table import build_model_spec


@pytest.fixture
def ml4(published: dict[str, Any]) -> ModelSpec:
    return build_model_spec(published, name="ML4")


@pytest.mark.parametrize(
    ("layout", "bytes_per_token"), [("fp8_ds_mla", 47136), ("e4m3", 42096), ("bf16", 78384)]
)
def test_bytes_per_token(ml4: ModelSpec, layout: str, bytes_per_token: int) -> None:
    # B027: each owner once, the indexer at its own width.
    index = index_layout("planar_f32").bytes_per_token
    row = RowBytes(latent_layout(layout).bytes_per_token, index)
    assert kv_bytes_per_token(ml4, row) == bytes_per_token


def test_bytes_per_token_without_sharing(published: dict[str, Any]) -> None:
    row = RowBytes(656, 132)
    del published["kv_sharing"]
    assert kv_bytes_per_token(build_model_spec(published), row) == 53040
    published["indexer"]["topk_pattern"] = "F" * 72
    assert kv_bytes_per_token(build_model_spec(published), row) == 56736


def test_parameters_of_ml4(ml4: ModelSpec) -> None:
    counts = parameters(ml4)
    assert round(counts["total"] / 1e9, 1) == 1047.8
    assert round(counts["active"] / 1e9, 2) == 49.18
    assert round((counts["active"] + counts["embedding"]) / 1e9, 2) == 50.79


def test_parameters_of_relatives(large_3: dict[str, Any], small_4: dict[str, Any]) -> None:
    # Published as 673 and 119 billion, without the vision encoder.
    assert round(parameters(build_model_spec(large_3))["total"] / 1e9) == 673
    assert round(parameters(build_model_spec(small_4))["total"] / 1e9) == 119


def test_tied_embeddings_count_once(small: dict[str, Any]) -> None:
    untied = parameters(build_model_spec(small))
    tied = parameters(build_model_spec(small | {"tied_embeddings": True}))
    assert untied["total"] - tied["total"] == 512 * 128
    assert tied["embedding"] == 512 * 128
    assert untied["active"] == tied["active"]


def test_description_is_json(ml4: ModelSpec) -> None:
    data = describe(ml4, rows={"fp8_ds_mla": RowBytes(656, 132)})
    assert json.loads(json.dumps(data)) == data
    assert data["name"] == "ML4"
    assert data["kv"] == {
        "latent_owners": 63,
        "index_owners": 44,
        "bytes_per_token": {"fp8_ds_mla": 47136},
    }
    assert len(data["layers"]) == 72
    assert data["layers"][39]["kv_source"] == 35
    assert data["layers"][39]["topk"] == 2048
    assert data["layers"][17]["topk"] is None
    assert data["layers"][17]["topk_source"] == 16
    assert data["assumptions"] == dict(ml4.assumptions)
    assert data["other_blocks"] == ["mtp", "vision_encoder"]
    assert "checkpoint" not in data


@pytest.mark.parametrize(("flag", "factor"), [(False, 1.0), (True, 1.7366)])
def test_resolved_magnitude_is_shown(large_3: dict[str, Any], flag: bool, factor: float) -> None:
    # B042: factor 24 gives 1.3178, which the softmax scale has squared.
    large_3["yarn"] |= {"factor": 24, "apply_scale": flag}
    rope = describe(build_model_spec(large_3))["rope"]
    assert rope["softmax_scale_factor"] == pytest.approx(factor, abs=1e-4)
    assert rope["yarn"]["factor"] == 24.0


def test_without_rotary_embedding(small: dict[str, Any]) -> None:
    small |= {"nope_layers": list(range(8)), "qk_rope_head_dim": 0}
    del small["head_dim"], small["lerope"], small["indexer"]["types"]
    small["indexer"]["topk_pattern"] = "F" * 8
    assert describe(build_model_spec(small))["rope"] is None
