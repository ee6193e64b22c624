"""Small models with the layer pattern of the large one, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

SeededFormat = Literal[
    "bf16", "fp32", "fp8_block", "fp8_tensor", "nvfp4_ct", "nvfp4_modelopt", "mxfp4"
]
"""Of the matrices of a seeded checkpoint, see `seed_checkpoint`."""


@dataclass(frozen=True)
class SeededConfig:
    """The dimensions of a seeded model. The defaults are the preset `tiny`.

    Layer 0 is dense, the others MoE. Every fourth layer (3, 7, 11, ...) has no rotary embedding;
    the first of them owns a latent that the others read. `index_heads` 0: no indexer.
    """

    layers: int = 12
    hidden: int = 256
    heads: int = 8
    nope_dim: int = 32
    nope_layer_dim: int = 48
    """q.k dims of NoPE layers; unlike `nope_dim`, so that no layer can pass for another."""
    rope_dim: int = 64
    v_dim: int = 64
    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    nope_every: int | None = 4
    index_heads: int = 4
    index_head_dim: int = 128
    topk: int = 256
    dense_width: int = 384
    experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 128
    shared_experts: int = 1
    dense_layers: int = 1
    vocab: int = 8192
    yarn_factor: float = 8.0
    yarn_original: int = 1024
    learned_scaling: bool = True
    """SSMax of kind `log` and frequencies, both learned; else the family's kind `llama4`."""
    index_interleave: bool = True
    index_query_norm: bool = True

    @property
    def nope_layers(self) -> tuple[int, ...]:
        n = self.nope_every
        return tuple(range(n - 1, self.layers, n)) if n is not None else ()

    @property
    def pattern(self) -> str:
        """F where a layer owns an indexer: the first two, every fourth, and the NoPE layers."""
        return "".join(
            "F" if layer < 2 or layer % 4 == 0 or layer in self.nope_layers else "S"
            for layer in range(self.layers)
        )

    def params(self) -> dict[str, Any]:
        """The content of params.json. Every choice is stated: nothing is left to a default."""
        params: dict[str, Any] = {
            "dim": self.hidden,
            "n_layers": self.layers,
            "n_heads": self.heads,
            "n_kv_heads": self.heads,
            "head_dim": self.nope_dim + self.rope_dim,
            "hidden_dim": self.dense_width,
            "norm_eps": 1e-6,
            "vocab_size": self.vocab,
            "tied_embeddings": False,
            "max_position_embeddings": int(self.yarn_factor * self.yarn_original),
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.v_dim,
            "rope_theta": 10000.0,
            "rope_interleave": True,
            "yarn": {
                "original_max_position_embeddings": self.yarn_original,
                "factor": self.yarn_factor,
                "beta": 32.0,
                "alpha": 1.0,
                "apply_scale": False,
            },
            "moe": {
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "num_shared_experts": self.shared_experts,
                "expert_hidden_dim": self.expert_width,
                "first_k_dense_replace": self.dense_layers,
                "route_every_n": 1,
                "routed_scale": 1.0,
                "num_expert_groups": 1,
                "num_expert_groups_per_tok": 1,
                "renorm_strategy": "WEIGHTS",
            },
        }
        if self.shared_experts:
            params["moe"]["shared_expert_hidden_dim"] = self.expert_width * self.shared_experts
        return params | self._scaling() | self._nope() | self._indexer()

    def _scaling(self) -> dict[str, Any]:
        if not self.learned_scaling:
            original = self.yarn_original
            return {"llama_4_scaling": {"original_max_position_embeddings": original, "beta": 0.1}}
        return {
            "ssmax": {"kind": "log", "n": "context", "per_head": True, "bias": True},
            "lerope": {"storage": "multiplier", "scope": "global"},
        }

    def _nope(self) -> dict[str, Any]:
        if not self.nope_layers:
            return {}
        owner, *consumers = self.nope_layers
        return {
            "nope_every": self.nope_every,
            "nope_qk_head_dim": self.nope_layer_dim,
            "nope_wkv_a_rope_rows": False,
            "kv_sharing": {str(layer): owner for layer in consumers},
            "kv_sharing_own_wkv_b": True,
        }

    def _indexer(self) -> dict[str, Any]:
        if not self.index_heads:
            return {}
        ssmax: dict[str, Any] = {"kind": "none"}
        if self.learned_scaling:
            ssmax = {"kind": "log", "n": "context", "per_head": True, "bias": False}
        return {
            "indexer": {
                "n_heads": self.index_heads,
                "head_dim": self.index_head_dim,
                "topk": self.topk,
                "topk_pattern": self.pattern,
                "nope_owners": True,
                "query_input": "hidden" if self.q_lora_rank is None else "q_lora",
                "rope_interleave": self.index_interleave,
                "q_norm": self.index_query_norm,
                "norm_eps": 1e-6,
                "hadamard": False,
                "scale_fmt": "ue8m0",
                "ssmax": ssmax,
            }
        }


_RELATIVE = SeededConfig(layers=4, q_lora_rank=128, nope_every=None, learned_scaling=False)

PRESETS: Mapping[str, SeededConfig] = MappingProxyType(
    {
        "tiny": SeededConfig(),
        # Seconds, and a few megabytes, for tests.
        "micro": SeededConfig(
            layers=8,
            hidden=128,
            heads=4,
            topk=16,
            experts=4,
            experts_per_token=2,
            expert_width=256,
            dense_width=192,
        ),
        # Relatives: every layer attends to all keys; and an indexer fed by the query's LoRA.
        "dense_mla": replace(_RELATIVE, index_heads=0),
        "lora_indexer": replace(_RELATIVE, index_interleave=False, index_query_norm=False),
    }
)
"""Named configurations. `tiny` is the one to serve."""
