"""One canonical name for each tensor, whatever the checkpoint calls it."""

from __future__ import annotations

import pytest

from ml4core.api import ModelSpec
from ml4core.models.tensor_names import canonical, part_of
from ml4core.models.tensor_table import expected_tensors

ALIASES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "language_model.model.embed_tokens.weight": "tok_embeddings.weight",
    "model.language_model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "lm_head.weight_scale_inv": "output.weight_scale_inv",
    "model.layers.7.input_layernorm.weight": "layers.7.attention_norm.weight",
    "model.layers.7.post_attention_layernorm.weight": "layers.7.ffn_norm.weight",
    "model.layers.7.self_attn.q_proj.weight": "layers.7.attention.wq.weight",
    "model.layers.7.self_attn.q_a_proj.weight": "layers.7.attention.wq_a.weight",
    "model.layers.7.self_attn.q_a_layernorm.weight": "layers.7.attention.q_a_norm.weight",
    "model.layers.7.self_attn.q_b_proj.weight": "layers.7.attention.wq_b.weight",
    "model.layers.70.self_attn.kv_a_proj_with_mqa.weight": (
        "layers.70.attention.wkv_a_with_mqa.weight"
    ),
    "model.layers.7.self_attn.kv_a_layernorm.weight": "layers.7.attention.kv_a_norm.weight",
    "model.layers.7.self_attn.kv_b_proj.weight": "layers.7.attention.wkv_b.weight",
    "model.layers.7.self_attn.o_proj.weight": "layers.7.attention.wo.weight",
    "model.layers.7.self_attn.indexer.wq_b.weight": "layers.7.attention.indexer.wq.weight",
    "model.layers.7.self_attn.indexer.wk.weight": "layers.7.attention.indexer.wk.weight",
    "model.layers.7.self_attn.indexer.k_norm.bias": "layers.7.attention.indexer.k_norm.bias",
    "layers.7.attention.indexer.q_norm.bias": "layers.7.attention.indexer.q_norm.bias",
    "layers.7.attention.ssmax": "layers.7.attention.ssmax_scale",
    "layers.7.attention.s": "layers.7.attention.ssmax_scale",
    "layers.7.attention.ssmax.weight": "layers.7.attention.ssmax_scale",
    "layers.7.attention.ssmax.bias": "layers.7.attention.ssmax_bias",
    "layers.7.attention.indexer.ssmax": "layers.7.attention.indexer.ssmax_scale",
    "layers.7.attention.rope_freqs.weight": "layers.7.attention.rope_freqs",
    "rope_freqs_multiplier": "rope_freqs",
    "model.layers.7.mlp.gate.weight": "layers.7.gate.weight",
    "model.layers.7.mlp.gate.e_score_correction_bias": "layers.7.gate.bias",
    "model.layers.7.mlp.gate_proj.weight": "layers.7.feed_forward.w1.weight",
    "model.layers.7.mlp.down_proj.weight": "layers.7.feed_forward.w2.weight",
    "model.layers.7.mlp.up_proj.weight": "layers.7.feed_forward.w3.weight",
    "model.layers.7.mlp.experts.12.gate_proj.weight": "layers.7.experts.12.w1.weight",
    "model.layers.7.mlp.experts.12.down_proj.weight": "layers.7.experts.12.w2.weight",
    "model.layers.7.mlp.experts.12.up_proj.weight": "layers.7.experts.12.w3.weight",
    "model.layers.7.mlp.shared_experts.down_proj.weight": "layers.7.shared_experts.w2.weight",
    "layers.7.experts.12.w1.qscale_weight": "layers.7.experts.12.w1.qscale_weight",
    "layers.7.experts.12.w1.weight_packed": "layers.7.experts.12.w1.weight_packed",
}


@pytest.mark.parametrize("name", ALIASES)
def test_alias(name: str) -> None:
    assert str(canonical(name)) == ALIASES[name]


def test_canonical_names_stay_as_they_are(spec: ModelSpec) -> None:
    for name in expected_tensors(spec):
        assert str(canonical(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        "layers.07.gate.weight",
        "layers.-1.gate.weight",
        "layers.7.gate",
        "layers.7.attention.wq",
        "layers.7.attention.wq.weight.weight",
        "layers.7.attention.wq.weights",
        "layers.7.attention.wz.weight",
        "layers.7.experts.x.w1.weight",
        "layers.7.experts.1.w4.weight",
        "layers.7.attention.wq.weight ",
        "xlayers.7.attention.wq.weight",
        "layers.7.attention.wq.weight\n",
        "layers.٣.gate.weight",
        "",
        "weight",
        "mtp_dspark.norm.weight",
    ],
)
def test_other_names_are_not_known(name: str) -> None:
    assert canonical(name) is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mtp_dspark.layers.0.attention.wq.weight", "drafter"),
        ("vision_encoder.patch_conv.weight", "vision encoder"),
        ("vision_language_adapter.w_in.weight", "vision encoder"),
        ("patch_merger.merging_layer.weight", "vision encoder"),
        ("pre_mm_projector_norm.weight", "vision encoder"),
    ],
)
def test_parts(name: str, part: str) -> None:
    found = part_of(name)
    assert found is not None
    assert found.name == part


def test_the_decoder_is_no_part(spec: ModelSpec) -> None:
    assert all(part_of(name) is None for name in expected_tensors(spec))
