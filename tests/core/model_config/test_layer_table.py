"""The table of layers: published ML4, relatives, and each trait."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ml4core.api import ModelSpec
from ml4core.models.layer_table import build_model_spec
from ml4core.models.positions import mscale
from ml4core.models.tensor_table import expected_tensors

NOPE = list(range(3, 72, 4))
CONSUMERS = list(range(39, 72, 4))


@pytest.fixture
def ml4(published: dict[str, Any]) -> ModelSpec:
    return build_model_spec(published, name="ML4")


def test_layers_of_ml4(ml4: ModelSpec) -> None:
    assert (len(ml4.layers), ml4.hidden_size, ml4.max_position) == (72, 6144, 1048576)
    assert [layer.index for layer in ml4.layers] == list(range(72))
    assert [layer.index for layer in ml4.layers if layer.rope is None] == NOPE
    assert [layer.index for layer in ml4.layers if layer.rope_dim == 0] == NOPE
    assert [layer.index for layer in ml4.layers if layer.moe is None] == [0]
    assert ml4.layers[0].dense_width == 16384
    assert all(layer.dense_width is None for layer in ml4.layers[1:])
    assert ml4.taps == (1, 18, 36, 54, 71)


def test_latent_owners_of_ml4(ml4: ModelSpec) -> None:
    assert len(ml4.kv_owners) == 63
    assert [layer.index for layer in ml4.layers if not layer.owns_kv] == CONSUMERS
    assert {ml4.layers[n].kv_source for n in CONSUMERS} == {35}
    assert all(ml4.layers[n].kv_source == n for n in ml4.kv_owners)


def test_index_owners_of_ml4(ml4: ModelSpec) -> None:
    assert len(ml4.index_owners) == 44
    assert set(NOPE) <= set(ml4.index_owners)
    sharers = [layer.index for layer in ml4.layers if not layer.owns_index]
    assert sharers == [n for n in range(16, 72) if n % 4 in (1, 2)]
    assert [ml4.layers[n].topk_source for n in (17, 18, 21, 37, 39)] == [16, 16, 20, 36, 39]
    assert all((layer.indexer is None) == (layer.index in sharers) for layer in ml4.layers)


def test_rotated_dims_of_the_indexer_follow_the_layer(ml4: ModelSpec) -> None:
    for layer in ml4.layers:
        if layer.indexer is not None:
            assert layer.indexer.rope_dim == (0 if layer.index in NOPE else 64)
            assert (layer.indexer.heads, layer.indexer.head_dim) == (32, 128)
            assert (layer.indexer.topk, layer.indexer.query_input) == (2048, "hidden")
            assert layer.indexer.scale == pytest.approx(128**-0.5 * 32**-0.5)


def test_softmax_scale_is_of_the_unabsorbed_head(ml4: ModelSpec) -> None:
    assert {layer.softmax_scale for layer in ml4.layers if layer.rope} == {128**-0.5}
    assert {layer.softmax_scale for layer in ml4.layers if not layer.rope} == {64**-0.5}


# Shapes with 64 q.k dims, 128 value dims, 32 index heads and a dense width of 16384.
SHAPES = {
    # name: rope layer 1, NoPE owner 3, NoPE consumer 39
    "attention.wq.weight": ([8192, 6144], [4096, 6144], [4096, 6144]),
    "attention.wkv_a_with_mqa.weight": ([576, 6144], [512, 6144], None),
    "attention.kv_a_norm.weight": ([512], [512], None),
    "attention.wkv_b.weight": ([12288, 512],) * 3,
    "attention.wo.weight": ([6144, 8192],) * 3,
    "attention.indexer.wq.weight": ([4096, 6144],) * 3,
    "attention.indexer.wk.weight": ([128, 6144],) * 3,
    "attention.indexer.weights_proj.weight": ([32, 6144],) * 3,
    "attention.indexer.q_norm.weight": ([128],) * 3,
    "attention.indexer.q_norm.bias": ([128],) * 3,
    "attention.indexer.k_norm.weight": ([128],) * 3,
    "attention.indexer.k_norm.bias": ([128],) * 3,
    "gate.weight": ([128, 6144],) * 3,
    "experts.127.w1.weight": ([6144, 6144],) * 3,
    "experts.127.w2.weight": ([6144, 6144],) * 3,
    "experts.127.w3.weight": ([6144, 6144],) * 3,
    "shared_experts.w1.weight": ([6144, 6144],) * 3,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_ml4(ml4: ModelSpec, name: str) -> None:
    table = expected_tensors(ml4)
    for layer, shape in zip((1, 3, 39), SHAPES[name], strict=True):
        entry = table.get(f"layers.{layer}.{name}")
        if shape is None:
            assert entry is not None
            assert not entry.used
        else:
            assert entry is not None
            assert list(entry.shapes[0]) == shape


def test_only_index_owners_have_index_tensors(ml4: ModelSpec) -> None:
    names = expected_tensors(ml4)
    have = {int(name.split(".")[1]) for name in names if ".indexer." in name}
    assert have == set(ml4.index_owners)


def test_dense_layer_and_outer_shapes_of_ml4(ml4: ModelSpec) -> None:
    table = expected_tensors(ml4)
    assert table["layers.0.feed_forward.w1.weight"].shapes == ((16384, 6144),)
    assert table["layers.0.feed_forward.w2.weight"].shapes == ((6144, 16384),)
    assert not any(name.startswith("layers.0.experts") for name in table)
    assert table["tok_embeddings.weight"].shapes == ((131072, 6144),)
    assert table["rope_freqs"].shapes == ((32,),)
    assert len(table) == len(set(table))


def test_kinds_of_layers(ml4: ModelSpec) -> None:
    kinds = {n: ml4.layers[n].kind for n in (0, 1, 17, 35, 39)}
    assert kinds == {
        0: "rope+kv_owner+index_owner+dense",
        1: "rope+kv_owner+index_owner+moe",
        17: "rope+kv_owner+index_sharer+moe",
        35: "nope+kv_owner+index_owner+moe",
        39: "nope+kv_consumer+index_owner+moe",
    }


def test_schedule_by_frequency_and_offset(published: dict[str, Any]) -> None:
    published["indexer"] |= {"topk_pattern": {"freq": 2, "offset": 16}}
    spec = build_model_spec(published)
    assert [n for n in range(72) if n not in spec.index_owners] == list(range(16, 71, 2))
    assert len(spec.index_owners) == 44


@pytest.mark.parametrize(("freq", "offset"), [(4, 35), (3, 30), (2, 17)])
def test_schedules_that_make_nope_layers_share_are_refused(
    published: dict[str, Any], freq: int, offset: int
) -> None:
    published["indexer"] |= {"topk_pattern": {"freq": freq, "offset": offset}}
    with pytest.raises(ValueError, match=r"indexer.topk_pattern: NoPE layers \[.*\] share"):
        build_model_spec(published)
    published["indexer"] |= {"nope_owners": False}
    assert len(build_model_spec(published).index_owners) == 44


def test_three_forms_of_one_schedule(small: dict[str, Any]) -> None:
    full = build_model_spec(small).index_owners
    assert full == (0, 1, 3, 4, 7)
    del small["indexer"]["types"]
    small["indexer"]["topk_pattern"] = "FFSFFSSF"
    assert build_model_spec(small).index_owners == full


def test_a_sharer_uses_the_nearest_owner_before_it(small: dict[str, Any]) -> None:
    # B013: neither the owner after it, nor the first one, nor itself.
    sources = [layer.topk_source for layer in build_model_spec(small).layers]
    assert sources == [0, 1, 1, 3, 4, 4, 4, 7]


def test_nope_every_is_nope_layers(small: dict[str, Any]) -> None:
    by_list = build_model_spec(small).layers
    del small["nope_layers"]
    small["nope_every"] = 4
    assert build_model_spec(small).layers == by_list


def test_nope_layers_have_their_own_width(small: dict[str, Any]) -> None:
    spec = build_model_spec(small)
    assert [layer.nope_dim for layer in spec.layers] == [32, 32, 32, 40, 32, 32, 32, 40]
    assert spec.layers[3].softmax_scale == 40**-0.5
    assert spec.layers[0].softmax_scale == 96**-0.5
    assert [layer.q_dim for layer in spec.layers[2:4]] == [96, 40]


def test_route_every_n(small: dict[str, Any]) -> None:
    small["moe"] |= {"first_k_dense_replace": 2, "route_every_n": 3}
    assert [layer.index for layer in build_model_spec(small).layers if layer.moe] == [3, 6]


def test_without_experts_all_layers_are_dense(small: dict[str, Any]) -> None:
    del small["moe"]
    assert all(layer.dense_width == 192 for layer in build_model_spec(small).layers)


@pytest.mark.parametrize("factor", [24.0, 36.0, 128.0])
def test_magnitude_correction_of_yarn(large_3: dict[str, Any], factor: float) -> None:
    # B042: the flag decides, and decides once, in the softmax scale; frequencies are the same.
    large_3["yarn"] |= {"factor": factor}
    without = build_model_spec(large_3)
    large_3["yarn"] |= {"apply_scale": True}
    with_it = build_model_spec(large_3)
    m = 0.1 * math.log(factor) + 1.0
    assert without.layers[0].softmax_scale == 192**-0.5
    assert with_it.layers[0].softmax_scale == pytest.approx(192**-0.5 * m * m, rel=1e-12)
    assert without.layers[0].rope != with_it.layers[0].rope


def test_magnitude_correction_by_number() -> None:
    assert round(mscale(24.0), 4) == 1.3178
    assert round(mscale(36.0) ** 2, 4) == 1.8451
    assert round(mscale(128.0) ** 2, 4) == 2.2058
    assert mscale(1.0) == 1.0


def test_missing_flag_means_no_correction_and_is_recorded(large_3: dict[str, Any]) -> None:
    del large_3["yarn"]["apply_scale"]
    spec = build_model_spec(large_3)
    assert spec.layers[0].softmax_scale == 192**-0.5
    assert spec.assumptions["A15/yarn.apply_scale"].startswith("False: not stated; the default")


def test_nope_layers_have_no_magnitude_correction(small: dict[str, Any]) -> None:
    small["yarn"]["apply_scale"] = True
    spec = build_model_spec(small)
    assert spec.layers[3].softmax_scale == 40**-0.5
    assert spec.layers[2].softmax_scale > 96**-0.5


def test_large_3(large_3: dict[str, Any]) -> None:
    spec = build_model_spec(large_3)
    assert spec.max_position == 294912
    assert (len(spec.kv_owners), len(spec.index_owners)) == (61, 0)
    assert [layer.index for layer in spec.layers if layer.moe is None] == [0, 1, 2]
    layer = spec.layers[3]
    assert layer.kind == "rope+kv_owner+no_index+moe"
    assert (layer.heads, layer.q_lora_rank, layer.nope_dim, layer.rope_dim) == (128, 1536, 128, 64)
    assert layer.moe is not None
    assert (layer.moe.expert_width, layer.moe.shared_width, layer.moe.topk) == (4096, 4096, 4)
    assert (layer.ssmax.kind, layer.ssmax.beta) == ("llama4", 0.1)
    assert layer.rope is not None
    assert layer.rope.interleaved
    assert layer.rope.yarn is not None
    assert (layer.rope.yarn.factor, layer.rope.lerope) == (36.0, "none")
    table = expected_tensors(spec)
    assert table["layers.3.attention.wq_a.weight"].shapes == ((1536, 7168),)
    assert table["layers.3.attention.wq_b.weight"].shapes == ((128 * 192, 1536),)
    assert table["layers.3.attention.wkv_b.weight"].shapes == ((128 * 256, 512),)
    assert "layers.3.attention.wq.weight" not in table
    assert set(spec.assumptions) == {
        "A17/moe.renorm_strategy",
        "A6/moe.shared_expert_hidden_dim",
    } | {"A19/vision_encoder"}


def test_small_4(small_4: dict[str, Any]) -> None:
    spec = build_model_spec(small_4)
    assert all(layer.moe is not None and layer.dense_width is None for layer in spec.layers)
    layer = spec.layers[0]
    assert (layer.kv_lora_rank, layer.q_lora_rank, layer.absorbed_dim) == (256, 1024, 320)
    assert layer.softmax_scale == 128**-0.5


def test_indexer_fed_by_the_query_lora(large_3: dict[str, Any]) -> None:
    # The form of DeepSeek V3.2: rotation of halves, no norm of the query, every layer an owner.
    large_3["indexer"] = {
        "n_heads": 64,
        "head_dim": 128,
        "topk": 2048,
        "topk_pattern": "F" * 61,
        "rope_interleave": False,
        "q_norm": False,
        "norm_eps": 1e-6,
    }
    large_3["ssmax"] = {"kind": "none"}
    del large_3["llama_4_scaling"]
    spec = build_model_spec(large_3)
    indexer = spec.layers[5].indexer
    assert indexer is not None
    assert (indexer.query_input, indexer.rope_interleaved, indexer.query_norm) == (
        "q_lora",
        False,
        False,
    )
    assert (indexer.rope_dim, indexer.norm_eps, indexer.ssmax.kind) == (64, 1e-6, "none")
    assert spec.layers[5].ssmax.kind == "none"
    table = expected_tensors(spec)
    assert table["layers.5.attention.indexer.wq.weight"].shapes == ((8192, 1536),)
    assert not any("q_norm" in name for name in table)


def test_scaling_kinds(small: dict[str, Any]) -> None:
    small["ssmax"] = {
        "kind": "pow",
        "beta": 0.1,
        "original_max_position_embeddings": 2048,
        "n": "topk",
    }
    ssmax = build_model_spec(small).layers[0].ssmax
    assert (ssmax.kind, ssmax.beta, ssmax.original_max_position) == ("pow", 0.1, 2048)
    assert (ssmax.n_limit, ssmax.per_head, ssmax.bias) == (16, False, False)


def test_context_is_counted_whole_unless_stated(small: dict[str, Any]) -> None:
    # B044: the factor follows the visible keys, not the number that is selected.
    spec = build_model_spec(small)
    assert spec.layers[0].ssmax.n_limit is None
    assert spec.layers[0].indexer is not None
    assert spec.layers[0].indexer.ssmax.n_limit is None


def test_max_position_falls_back(large_3: dict[str, Any]) -> None:
    del large_3["max_position_embeddings"]
    assert build_model_spec(large_3).max_position == 262144
    del large_3["max_seq_len"]
    assert build_model_spec(large_3).max_position == 8192 * 36


def test_a_model_without_any_rotary_embedding(small: dict[str, Any]) -> None:
    small |= {"nope_layers": list(range(8)), "qk_rope_head_dim": 0}
    del small["head_dim"], small["lerope"], small["indexer"]["types"]
    small["indexer"]["topk_pattern"] = "F" * 8
    spec = build_model_spec(small)
    assert all(layer.rope is None and layer.absorbed_dim == 512 for layer in spec.layers)
