"""params.json of ML4 and of its published relatives."""

from __future__ import annotations

import copy
import json
from importlib import resources
from typing import Any

import pytest

# Mistral Large 3, as published: q-LoRA, no indexer, three dense layers.
LARGE_3: dict[str, Any] = {
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 192,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "norm_eps": 1e-6,
    "vocab_size": 131072,
    "tied_embeddings": False,
    "rope_theta": 10000.0,
    "max_position_embeddings": 294912,
    "max_seq_len": 262144,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "sliding_window": None,
    "moe": {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 3,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0,
        "expert_hidden_dim": 4096,
        "num_shared_experts": 1,
    },
    "yarn": {
        "original_max_position_embeddings": 8192,
        "factor": 36,
        "apply_scale": False,
        "beta": 32,
        "alpha": 1,
    },
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "vision_encoder": {"hidden_size": 1664, "num_hidden_layers": 48},
}

# Mistral Small 4, as published: every layer is MoE.
SMALL_4: dict[str, Any] = LARGE_3 | {
    "dim": 4096,
    "n_layers": 36,
    "n_heads": 32,
    "n_kv_heads": 32,
    "head_dim": 128,
    "hidden_dim": 12288,
    "max_position_embeddings": 1048576,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "moe": LARGE_3["moe"] | {"expert_hidden_dim": 2048, "first_k_dense_replace": 0},
    "yarn": LARGE_3["yarn"] | {"factor": 128},
}


@pytest.fixture
def large_3() -> dict[str, Any]:
    return copy.deepcopy(LARGE_3)


@pytest.fixture
def small_4() -> dict[str, Any]:
    return copy.deepcopy(SMALL_4)


@pytest.fixture
def published() -> dict[str, Any]:
    """The params.json that comes with the package: ML4, as far as it is published."""
    text = (resources.files("ml4core") / "assets/published/params.json").read_text("utf-8")
    return json.loads(text)


@pytest.fixture
def small() -> dict[str, Any]:
    """Eight layers with every trait, and nothing left open."""
    return {
        "dim": 128,
        "n_layers": 8,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 96,
        "hidden_dim": 192,
        "norm_eps": 1e-6,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 48,
        "rope_theta": 10000.0,
        "yarn": {
            "original_max_position_embeddings": 1024,
            "factor": 8.0,
            "beta": 32.0,
            "alpha": 1.0,
            "apply_scale": False,
        },
        "ssmax": {"kind": "log", "n": "context", "per_head": True, "bias": True},
        "lerope": {"storage": "multiplier", "scope": "global"},
        "nope_layers": [3, 7],
        "nope_qk_head_dim": 40,
        "nope_wkv_a_rope_rows": False,
        "kv_sharing": {"7": 3},
        "kv_sharing_own_wkv_b": True,
        "indexer": {
            "n_heads": 4,
            "head_dim": 128,
            "topk": 16,
            "types": ["full", "full", "shared", "full", "full", "shared", "shared", "full"],
            "nope_owners": True,
            "rope_interleave": True,
            "q_norm": True,
            "norm_eps": 1e-6,
            "hadamard": False,
            "scale_fmt": "ue8m0",
            "ssmax": {"kind": "log", "n": "context", "per_head": True},
        },
        "moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "expert_hidden_dim": 256,
            "shared_expert_hidden_dim": 256,
            "first_k_dense_replace": 1,
            "routed_scale": 1.0,
            "renorm_strategy": "WEIGHTS",
        },
        "mtp": {"target_layers": [1, 4, 7]},
    }
