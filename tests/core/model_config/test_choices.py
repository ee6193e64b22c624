"""What params.json leaves open: taken from tensors where they show it, else a recorded default."""

from __future__ import annotations

from typing import Any

import pytest

from ml4core.api import ModelSpec
from ml4core.models.assumptions import ASSUMPTIONS, Choices
from ml4core.models.errors import CheckpointError
from ml4core.models.layer_table import build_model_spec
from ml4core.models.tensor_table import expected_tensors

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def shapes_of(spec: ModelSpec) -> Shapes:
    return {
        name: ("BF16", entry.shapes[0])
        for name, entry in expected_tensors(spec).items()
        if entry.used
    }


def test_a_file_that_states_all_leaves_nothing_open(small: dict[str, Any]) -> None:
    assert build_model_spec(small).assumptions.keys() == {"A18/mtp"}


def test_everything_open_about_ml4_is_recorded(published: dict[str, Any]) -> None:
    record = build_model_spec(published).assumptions
    numbers = {key.split("/")[0] for key in record}
    assert numbers == {f"A{n}" for n in range(1, 21)}
    assert [int(key[1:].split("/")[0]) for key in record] == sorted(
        int(key[1:].split("/")[0]) for key in record
    )
    assert record["A1/v_head_dim"] == (
        "128: not stated; the default. Checked by: rows of wkv_b, columns of wo"
    )
    assert "44 owners, [0, 1, 2," in record["A7/indexer.types"]
    assert all("Checked by: " in text for text in record.values())


def test_stating_a_choice_takes_it_off_the_record(published: dict[str, Any]) -> None:
    published |= {"v_head_dim": 64, "vocab_size": 262144}
    published["indexer"] |= {"n_heads": 16, "rope_interleave": False}
    spec = build_model_spec(published)
    assert spec.layers[0].v_dim == 64
    assert spec.vocab_size == 262144
    assert spec.layers[0].indexer is not None
    assert (spec.layers[0].indexer.heads, spec.layers[0].indexer.rope_interleaved) == (16, False)
    for key in (
        "A1/v_head_dim",
        "A4/vocab_size",
        "A3/indexer.n_heads",
        "A10/indexer.rope_interleave",
    ):
        assert key not in spec.assumptions


OPEN = {
    "v_head_dim": "layers.0.attention.wo",
    "qk_nope_head_dim": "layers.0.attention.wkv_b",
    "nope_qk_head_dim": "layers.3.attention.wkv_b",
    "nope_wkv_a_rope_rows": "layers.3.attention.wkv_a_with_mqa",
    "vocab_size": "tok_embeddings",
    "hidden_dim": "layers.0.feed_forward.w1",
    "indexer.n_heads": "layers.0.attention.indexer.weights_proj",
    "indexer.q_norm": "layers.0.attention.indexer.q_norm",
    "indexer.types": "taken from the tensors",
    "moe.expert_hidden_dim": "layers.1.experts.0.w1",
    "moe.shared_expert_hidden_dim": "layers.1.shared_experts.w1",
    "ssmax": "layers.*.attention.ssmax_scale",
    "indexer.ssmax": "layers.*.attention.indexer.ssmax_scale",
    "lerope": "rope_freqs being here",
}


@pytest.mark.parametrize("path", OPEN)
def test_tensors_show_what_the_file_leaves_open(small: dict[str, Any], path: str) -> None:
    stated = build_model_spec(small)
    shapes = shapes_of(stated)
    *blocks, key = path.split(".")
    block = small[blocks[0]] if blocks else small
    del block[key]
    small.pop("head_dim")
    spec = build_model_spec(small, shapes)
    assert spec.layers == stated.layers
    assert spec.vocab_size == stated.vocab_size
    opened = {key: text for key, text in spec.assumptions.items() if key != "A18/mtp"}
    assert opened
    assert any(path in name for name in opened)
    assert any(OPEN[path] in text for text in opened.values())


def test_all_at_once(small: dict[str, Any]) -> None:
    stated = build_model_spec(small)
    shapes = shapes_of(stated)
    small.pop("head_dim")
    for path in OPEN:
        *blocks, key = path.split(".")
        (small[blocks[0]] if blocks else small).pop(key)
    assert build_model_spec(small, shapes).layers == stated.layers


def test_wide_latent_projection_of_nope_layers(small: dict[str, Any]) -> None:
    stated = build_model_spec(small | {"nope_wkv_a_rope_rows": True})
    assert stated.extras["nope_wkv_a_rope_rows"] == 64
    shapes = shapes_of(stated)
    assert shapes["layers.3.attention.wkv_a_with_mqa.weight"][1] == (576, 128)
    del small["nope_wkv_a_rope_rows"]
    spec = build_model_spec(small, shapes)
    assert spec.extras["nope_wkv_a_rope_rows"] == 64
    assert spec.layers == stated.layers


def test_scope_of_learned_frequencies(small: dict[str, Any]) -> None:
    small["lerope"] = {"storage": "log", "scope": "layer"}
    stated = build_model_spec(small)
    shapes = shapes_of(stated)
    assert "rope_freqs" not in shapes
    assert "layers.2.attention.rope_freqs" in shapes
    assert "layers.3.attention.rope_freqs" not in shapes
    small["lerope"] = {"storage": "log"}
    assert build_model_spec(small, shapes).layers == stated.layers


def test_aliases_show_as_much(small: dict[str, Any]) -> None:
    stated = build_model_spec(small)
    shapes = {
        f"model.{name}".replace("attention.", "self_attn.").replace("wo.", "o_proj."): value
        for name, value in shapes_of(stated).items()
    }
    del small["v_head_dim"]
    assert build_model_spec(small, shapes).layers == stated.layers


@pytest.mark.parametrize(("layer", "stated"), [(2, "shared"), (4, "full")])
def test_a_stated_schedule_must_agree_with_the_tensors(
    small: dict[str, Any], layer: int, stated: str
) -> None:
    shapes = shapes_of(build_model_spec(small))
    prefix = f"layers.{layer}.attention.indexer."
    if stated == "full":
        shapes = {name: value for name, value in shapes.items() if not name.startswith(prefix)}
    else:
        shapes[prefix + "wk.weight"] = ("BF16", (128, 128))
    with pytest.raises(
        CheckpointError, match=rf"layer {layer} is {stated}, but the checkpoint has"
    ):
        build_model_spec(small, shapes)


def test_a_schedule_seen_in_tensors_is_checked(small: dict[str, Any]) -> None:
    # B013: without an owner before it, layer 0 has no selection to share.
    shapes = shapes_of(build_model_spec(small))
    del small["indexer"]["types"]
    first = "layers.0.attention.indexer."
    without = {name: value for name, value in shapes.items() if not name.startswith(first)}
    with pytest.raises(CheckpointError, match="layer 0 shares a selection"):
        build_model_spec(small, without)
    nope = "layers.7.attention.indexer."
    without = {name: value for name, value in shapes.items() if not name.startswith(nope)}
    with pytest.raises(CheckpointError, match=r"NoPE layers \[7\] share"):
        build_model_spec(small, without)


def test_a_width_seen_in_tensors_must_agree_with_head_dim(small: dict[str, Any]) -> None:
    shapes = shapes_of(build_model_spec(small))
    del small["qk_nope_head_dim"]
    assert build_model_spec(small, shapes).layers[0].nope_dim == 32
    small["head_dim"] = 128
    with pytest.raises(CheckpointError, match="head_dim: 128; qk_nope_head_dim 32"):
        build_model_spec(small, shapes)


def test_shapes_that_show_nothing_leave_the_default(small: dict[str, Any]) -> None:
    shapes = shapes_of(build_model_spec(small))
    small.pop("head_dim")
    del small["v_head_dim"], small["indexer"]["n_heads"]
    shapes["layers.0.attention.wo.weight"] = ("BF16", (128, 191))  # no multiple of 4 heads
    shapes["layers.0.attention.indexer.weights_proj.weight"] = ("BF16", (4,))
    spec = build_model_spec(small, shapes)
    assert spec.layers[0].v_dim == 128
    assert spec.layers[0].indexer is not None
    assert spec.layers[0].indexer.heads == 32


def test_learned_tensors_decide_the_kind_of_scaling(small: dict[str, Any]) -> None:
    del small["ssmax"]
    without = build_model_spec(small)
    assert without.layers[0].ssmax.kind == "llama4"
    assert "A13/ssmax.kind" in without.assumptions
    shapes = shapes_of(without) | {"layers.5.attention.ssmax": ("F32", (4,))}
    spec = build_model_spec(small, shapes)
    # On every layer: where the tensor is missing it is missed.
    assert all(layer.ssmax.kind == "log" and layer.ssmax.per_head for layer in spec.layers)
    assert not any(layer.ssmax.bias for layer in spec.layers)


def test_constant_of_a_logarithm_is_recorded(small: dict[str, Any]) -> None:
    small["ssmax"] = {"kind": "log", "n": "context", "per_head": False}
    spec = build_model_spec(small)
    assert spec.layers[0].ssmax.scale == 1.0
    assert "A13/ssmax.scale" in spec.assumptions
    small["ssmax"] |= {"scale": 0.25}
    spec = build_model_spec(small)
    assert spec.layers[0].ssmax.scale == 0.25
    assert "A13/ssmax.scale" not in spec.assumptions


def test_each_open_choice_has_a_known_number() -> None:
    assert {entry.id for entry in ASSUMPTIONS.values()} == {f"A{n}" for n in range(1, 21)}
    with pytest.raises(KeyError):
        Choices().take("dim", None)
