"""Small random models of Hugging Face transformers, and the same weights as a checkpoint of ours.

transformers is imported inside functions only: it is a dependency of these tests, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ml4core.models.checkpoint import CheckpointWriter

from .random_weights import randomise

Params = dict[str, Any]

VOCAB = 320

# Module name at HF -> name in Mistral's format. MLA projections are not permuted between the two.
_MODULES: Mapping[str, str] = {
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.q_proj": "attention.wq",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "self_attn.indexer.wq_b": "attention.indexer.wq_b",
    "self_attn.indexer.wk": "attention.indexer.wk",
    "self_attn.indexer.k_norm": "attention.indexer.k_norm",
    "self_attn.indexer.weights_proj": "attention.indexer.weights_proj",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "gate",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.shared_experts.gate_proj": "shared_experts.w1",
    "mlp.shared_experts.down_proj": "shared_experts.w2",
    "mlp.shared_experts.up_proj": "shared_experts.w3",
}
_OUTER: Mapping[str, str] = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}

# The model code as it is written out, not one of its fast replacements.
_PLAIN: Mapping[str, str] = {"attn_implementation": "eager", "experts_implementation": "eager"}


@dataclass(frozen=True)
class Relative:
    """A Hugging Face model, and the params.json that describes it in our words."""

    model: nn.Module
    params: Params

    def save(self, folder: Path) -> Path:
        """Writes a checkpoint in Mistral's format, by our writer."""
        with CheckpointWriter(folder) as writer:
            for name, tensor in mistral_tensors(self.model.state_dict()):
                if name != "output.weight" or not self.params["tied_embeddings"]:
                    writer.add(name, tensor)
            writer.add_json("params.json", self.params)
        return folder

    def save_pretrained(self, folder: Path) -> Path:
        """Writes a checkpoint by Hugging Face's writer, with our params.json beside it."""
        self.model.save_pretrained(folder)  # type: ignore[operator]
        (folder / "params.json").write_text(json.dumps(self.params))
        return folder


def mistral_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A Hugging Face state dict under Mistral's names, a tensor an expert. Raises ``KeyError`` on a
    name that it doesn't know."""
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if module in _OUTER:
            yield f"{_OUTER[module]}.{leaf}", tensor
            continue
        _, _, layer, inner = module.split(".", 3)
        if inner == "mlp.experts":
            for expert, matrix in enumerate(tensor):
                stem = f"layers.{layer}.experts.{expert}"
                if leaf == "gate_up_proj":
                    gate, up = matrix.chunk(2)
                    yield f"{stem}.w1.weight", gate.contiguous()
                    yield f"{stem}.w3.weight", up.contiguous()
                else:
                    yield f"{stem}.w2.weight", matrix.contiguous()
        else:
            yield f"layers.{layer}.{_MODULES[inner]}.{leaf}", tensor


def mistral4(
    *,
    apply_scale: bool = False,
    q_lora_rank: int | None = 48,
    dense_layers: int = 1,
    renormalize: bool = True,
    routed_scale: float = 1.0,
    tied: bool = False,
    seed: int = 0,
) -> Relative:
    """Mistral Small 4, scaled down; YaRN and llama-4 scaling begin at position 64."""
    from transformers import Mistral4Config, Mistral4ForCausalLM

    original, factor, beta = 64, 8.0, 0.1
    # mscale over mscale is the factor of cos and sin; its square is in the softmax scale.
    yarn = {"mscale": 1.0, "mscale_all_dim": 1.0} if apply_scale else {"attention_factor": 1.0}
    config = Mistral4Config(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        norm_topk_prob=renormalize,
        routed_scaling_factor=routed_scale,
        first_k_dense_replace=dense_layers,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=32,
        v_head_dim=40,
        max_position_embeddings=int(original * factor),
        tie_word_embeddings=tied,
        pad_token_id=None,
        **_PLAIN,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "llama_4_scaling_beta": beta,
            **yarn,
        },
    )
    params = _params(config) | {
        "yarn": {
            "original_max_position_embeddings": original,
            "factor": factor,
            "beta": 4.0,
            "alpha": 1.0,
            "apply_scale": apply_scale,
        },
        "llama_4_scaling": {"original_max_position_embeddings": original, "beta": beta},
        "moe": {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "num_shared_experts": 1,
            "expert_hidden_dim": 48,
            "first_k_dense_replace": dense_layers,
            "routed_scale": routed_scale,
            "renorm_strategy": "WEIGHTS" if renormalize else "NONE",
        },
    }
    return Relative(randomise(Mistral4ForCausalLM(config), seed), params)


def deepseek_v32(*, topk: int, layers: int = 2, seed: int = 0) -> Relative:
    """DeepSeek V3.2 with dense feed-forwards: indexers rotate halves, and YaRN scales by m^2."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = DeepseekV32Config(**_dsa(topk, layers), rope_parameters=yarn)
    params = _params(config) | {
        "yarn": {
            "original_max_position_embeddings": 256,
            "factor": 4.0,
            "beta": 32.0,
            "alpha": 1.0,
            "apply_scale": True,
        },
        "ssmax": {"kind": "none"},
        "indexer": _indexer(config, ["full"] * layers, interleaved=False),
    }
    return Relative(randomise(DeepseekV32ForCausalLM(config), seed), params)


def glm_moe_dsa(*, topk: int, types: tuple[str, ...] = ("full", "full"), seed: int = 0) -> Relative:
    """GLM 5 with dense feed-forwards: ``shared`` layers use an earlier layer's selection."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig(
        **_dsa(topk, len(types)),
        rms_norm_eps=1e-6,
        indexer_types=list(types),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    params = _params(config) | {
        "ssmax": {"kind": "none"},
        "indexer": _indexer(config, list(types), interleaved=True),
    }
    return Relative(randomise(GlmMoeDsaForCausalLM(config), seed), params)


def _dsa(topk: int, layers: int) -> Params:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense"] * layers,
        "first_k_dense_replace": layers,
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 32,
        "v_head_dim": 40,
        "index_topk": topk,
        "index_head_dim": 128,
        "index_n_heads": 16,
        "max_position_embeddings": 1024,
        "pad_token_id": None,
        **_PLAIN,
    }


def _params(config: Any) -> Params:
    """The keys that all relatives share."""
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "hidden_dim": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_parameters["rope_theta"],
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
    }
    return params if config.q_lora_rank is None else params | {"q_lora_rank": config.q_lora_rank}


def _indexer(config: Any, types: list[str], *, interleaved: bool) -> Params:
    return {
        "n_heads": config.index_n_heads,
        "head_dim": config.index_head_dim,
        "topk": config.index_topk,
        "types": types,
        "query_input": "q_lora",
        "rope_interleave": interleaved,
        "q_norm": False,
        "norm_eps": 1e-6,
        "hadamard": False,
        "ssmax": {"kind": "none"},
    }
