"""config.json alone: what it says in our words, and what it says that can't be expressed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.hf_config import read_hf_config
from ml4core.models.layer_table import build_model_spec
from ml4core.models.tensors import load_model_spec

SMALL_4: dict[str, Any] = {
    "architectures": ["Mistral4ForCausalLM"],
    "model_type": "mistral4",
    "attention_bias": False,
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 32,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.5,
    },
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "5.24.0",
    "v_head_dim": 128,
    "vocab_size": 131072,
}
V32: dict[str, Any] = {
    key: value for key, value in SMALL_4.items() if key not in ("head_dim", "rope_parameters")
} | {
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "first_k_dense_replace": 36,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def table(config: dict[str, Any]) -> Any:
    return build_model_spec(read_hf_config(config, "config.json")[0])


def test_small_4() -> None:
    spec = table(SMALL_4)
    assert not spec.assumptions  # nothing is left to a default
    layer = spec.layers[35]
    assert (len(spec.layers), layer.heads, layer.kv_lora_rank, layer.q_lora_rank) == (
        36,
        32,
        256,
        1024,
    )
    assert (layer.nope_dim, layer.rope_dim, layer.v_dim) == (64, 64, 128)
    assert (layer.moe.experts, layer.moe.expert_width, layer.moe.shared_width) == (128, 2048, 2048)
    assert layer.rope.interleaved
    assert layer.rope.yarn.apply_scale
    assert layer.softmax_scale == pytest.approx(128**-0.5 * 2.2058, rel=1e-4)
    assert (layer.ssmax.kind, layer.ssmax.original_max_position) == ("llama4", 8192)


def test_older_keys_and_an_indexer() -> None:
    spec = table(V32)
    layer = spec.layers[0]
    assert (layer.rope.theta, layer.rope.yarn.factor, layer.rope.yarn.apply_scale) == (1e4, 40, 1)
    assert (layer.indexer.heads, layer.indexer.topk, layer.indexer.rope_interleaved) == (
        64,
        2048,
        False,
    )
    assert layer.indexer.query_input == "q_lora"
    assert layer.moe is None  # all layers are dense
    assert layer.ssmax.kind == "none"


def test_no_magnitude() -> None:
    for changes in ({"attention_factor": 1.0, "mscale_all_dim": 0}, {"factor": 1.0}):
        rope = {**SMALL_4["rope_parameters"], **changes}
        rope = {k: v for k, v in rope.items() if k != "mscale" or "factor" in changes}
        layer = table({**SMALL_4, "rope_parameters": rope}).layers[0]
        assert layer.softmax_scale == pytest.approx(128**-0.5)


def test_experts_by_another_key() -> None:
    config = {key: value for key, value in SMALL_4.items() if key != "n_routed_experts"}
    assert table({**config, "num_local_experts": 128}).layers == table(SMALL_4).layers


def test_plain_rope() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    layer = table({**SMALL_4, "rope_parameters": rope}).layers[0]
    assert (layer.rope.yarn, layer.rope.theta, layer.ssmax.kind) == (None, 5e5, "none")


def test_layers_of_glm() -> None:
    config = {
        **V32,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 6,
        "mlp_layer_types": ["dense"] * 6,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 2,
    }
    spec = table(config)
    assert [layer.topk_source for layer in spec.layers] == [0, 1, 1, 3, 3, 5]
    assert spec.layers[0].indexer.rope_interleaved
    assert spec.layers == table({**config, "index_topk_pattern": "FFSFSF"}).layers


def test_the_decoder_of_a_multimodal_model(tmp_path: Path) -> None:
    outer = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {**SMALL_4, "num_hidden_layers": 1},
        "vision_config": {"hidden_size": 1024},
        "image_token_index": 10,
        "quantization_config": {"quant_method": "fp8"},
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    checkpoint = Checkpoint.open(tmp_path, require_tensors=False)
    spec = load_model_spec(checkpoint)
    assert spec.layers == table({**SMALL_4, "num_hidden_layers": 1}).layers
    assert spec.extras["vision_config"] == {"hidden_size": 1024}
    assert spec.extras["quantization_config"] == {"quant_method": "fp8"}


def test_params_json_comes_first(tmp_path: Path) -> None:
    from ml4core.models.seeded import make_seeded

    folder = make_seeded(tmp_path / "m", "micro")
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard of"}))
    assert len(load_model_spec(Checkpoint.open(folder)).layers) == 8


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**SMALL_4["rope_parameters"], **changes}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "llama"}, "model_type: 'llama'; models of latent attention"),
    "no model": ({"model_type": None}, "model_type: None"),
    "sigmoid router": (
        {**V32, "first_k_dense_replace": 3},
        "model_type: 'deepseek_v32'; its router scores by sigmoid and adds a correction bias",
    ),
    "sigmoid by key": ({"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid'; routers that score"),
    "correction bias": ({"topk_method": "noaux_tc"}, "correction bias (e_score_correction_bias)"),
    "groups": ({"n_group": 8}, "n_group: 8; routing within groups of experts are not supported: 1"),
    "groups of a token": ({"topk_group": 4}, "topk_group: 4; routing within groups"),
    "bias": ({"attention_bias": True}, "attention_bias: True; biases of projections"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu'; other activations"),
    "window": ({"sliding_window": 4096}, "sliding_window: 4096; windows of decoder layers"),
    "two epsilons": ({"rms_norm_eps": 1e-5}, "rms_norm_eps: 1e-05; the norms of the latents"),
    "unknown key": ({"gated_heads": True}, "gated_heads: True; unknown key"),
    "missing key": ({"kv_lora_rank": None}, "kv_lora_rank: missing"),
    "dense in between": (
        {"mlp_layer_types": ["sparse", "dense"] * 18},
        "mlp_layer_types: ['sparse', 'dense'",
    ),
    "kinds of layers": (
        {"layer_types": ["full_attention", "sliding_attention"] * 18},
        "layer_types: ['sliding_attention']; other kinds of attention",
    ),
    "no rope": ({"rope_parameters": None}, "rope_parameters: missing"),
    "no theta": (rope(rope_theta=None), "rope_parameters.rope_theta: missing"),
    "half an indexer": ({**V32, "index_n_heads": None}, "index_n_heads: missing"),
    "rope type": (rope(rope_type="llama3"), "rope_parameters.rope_type: 'llama3'; rotary"),
    "unknown rope key": (rope(short_factor=[1.0]), "rope_parameters.short_factor: [1.0]; unknown"),
    "cos and sin scaled": (
        rope(attention_factor=1.2),
        "rope_parameters.attention_factor: 1.2 makes cos and sin 1.2 times as large",
    ),
    "mscale alone": (
        rope(mscale_all_dim=0),
        "rope_parameters.mscale: 1.0 makes cos and sin 1.4852 times as large",
    ),
    "part of the magnitude": (
        rope(mscale=0.707, mscale_all_dim=0.707),
        "rope_parameters.mscale_all_dim: 0.707; the softmax scale is corrected by YaRN's whole",
    ),
    "range not cut": (rope(truncate=False), "rope_parameters.truncate: False"),
    "no original context": (
        rope(original_max_position_embeddings=None),
        "rope_parameters.original_max_position_embeddings: None; YaRN needs it",
    ),
    "text for a number": (rope(mscale="1"), "rope_parameters.mscale: '1'; must be a number"),
    "rotated share": (
        rope(partial_rotary_factor=0.25),
        "rope_parameters.partial_rotary_factor: 0.25 of 128 dims; the rotated dims are",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed(case: str) -> None:
    changes, says = REFUSED[case]
    with pytest.raises(CheckpointError) as caught:
        table({**SMALL_4, **changes})
    assert says in str(caught.value)
    assert str(caught.value).startswith("config.json")


def test_all_reasons_in_one_error() -> None:
    config = {**SMALL_4, "n_group": 8, **rope(rope_type="linear")}
    with pytest.raises(CheckpointError, match=r"2 problems") as caught:
        table(config)
    assert "n_group" in str(caught.value)
    assert "rope_type" in str(caught.value)
