"""config.json of Hugging Face's latent-attention models, in the words of params.json.

What such a file says and our table of layers can't express is refused by name; so is a key that is
not known, as it may change the model. Projections lie in the file as they do in Mistral's format:
pairs to rotate are side by side, and no converter permutes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ml4core.models.errors import CheckpointError, shown
from ml4core.models.hf_rope import Rope, read_rope
from ml4core.models.params_file import refusal

Config = Mapping[str, Any]

# Router and indexer by model_type: what the files themselves do not say.
_SOFTMAX = ("mistral4",)
_INDEXED: Mapping[str, bool] = MappingProxyType({"deepseek_v32": False, "glm_moe_dsa": True})
"""Model types with an indexer -> whether it rotates neighbouring pairs."""
MODEL_TYPES = (*_SOFTMAX, "deepseek_v3", *_INDEXED)
_WRAPPERS = ("mistral3", "llava")
"""Multimodal models: the decoder is in `text_config`."""

# Our key -> theirs. Absent or null stays unsaid.
_SAME: Mapping[str, str] = MappingProxyType(
    {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "hidden_dim": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    }
)
_REQUIRED = tuple(key for key in _SAME if key not in ("n_kv_heads", "q_lora_rank"))
_MOE: Mapping[str, str] = MappingProxyType(
    {
        "num_experts_per_tok": "num_experts_per_tok",
        "expert_hidden_dim": "moe_intermediate_size",
        "routed_scale": "routed_scaling_factor",
    }
)
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
# Kinds of attention whose rows see all that came before, or a selection of it.
_ATTENTION = frozenset({"full_attention", "indexed_attention"})
# Keys of which one value is what we compute, and what another would need.
_FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "hidden_act": (("silu",), "other activations"),
        "attention_bias": ((False, None), "biases of projections"),
        "mlp_bias": ((False, None), "biases of projections"),
        "sliding_window": ((None,), "windows of decoder layers"),
        "scale_attention_logits": ((False, None), "scaled attention logits"),
        "logits_soft_cap": ((None,), "capped logits"),
    }
)
_FIXED_MOE: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "n_group": ((1, None), "routing within groups of experts"),
        "topk_group": ((1, None), "routing within groups of experts"),
        "scoring_func": (("softmax", None), "routers that score by sigmoid"),
        "topk_method": (
            ("greedy", None),
            "routing within groups, or with a correction bias (e_score_correction_bias)",
        ),
    }
)
# Without meaning for what a loaded model computes.
_IGNORED = frozenset(
    {
        "architectures",
        "model_type",
        "auto_map",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "initializer_range",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "pretraining_tp",
        "attention_dropout",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "head_dim",
        "qk_head_dim",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "problem_type",
    }
)
_READ = frozenset(
    {
        "tie_word_embeddings",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "rope_interleave",
        "first_k_dense_replace",
        "moe_layer_freq",
        "mlp_layer_types",
        "layer_types",
        "num_local_experts",
        "num_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "index_topk",
        "index_head_dim",
        "index_n_heads",
        "indexer_types",
        "index_topk_pattern",
        "index_topk_freq",
        "index_skip_topk_offset",
        "indexer_rope_interleave",
        "quantization_config",
    }
)


def read_hf_config(config: Config, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a params.json that describes the decoder of `config`; and of a multimodal
    model the block `vision_config`, else nothing.

    Raises CheckpointError that lists every key that can't be expressed, `where` naming the file.
    """
    vision: dict[str, Any] = {}
    model_type = config.get("model_type")
    if model_type in _WRAPPERS and isinstance(config.get("text_config"), Mapping):
        if config.get("vision_config") is not None:
            vision["vision_config"] = config["vision_config"]
        outer = config
        config = {**config["text_config"]}
        for key in ("quantization_config", "tie_word_embeddings"):
            if key in outer:
                config.setdefault(key, outer[key])
        model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{where}: model_type: {shown(model_type)}; models of latent attention are known: "
            f"{', '.join(MODEL_TYPES)}. Others need a params.json"
        )
    return _Reader(config, str(model_type), where).params(), vision


class _Reader:
    def __init__(self, config: Config, model_type: str, where: str) -> None:
        self.config = config
        self.model_type = model_type
        self.where = where
        self.problems: list[str] = []

    def params(self) -> dict[str, Any]:
        config = self.config
        self._known()
        self._fixed(_FIXED)
        params: dict[str, Any] = {
            ours: config[theirs] for ours, theirs in _SAME.items() if config.get(theirs) is not None
        }
        missing = [_SAME[key] for key in _REQUIRED if key not in params]
        self.problems += [f"{key}: missing; it has no default" for key in missing]
        params["tied_embeddings"] = bool(config.get("tie_word_embeddings", False))
        self._eps()
        self._layer_types()
        if not self.problems:  # widths are numbers from here on, or parse_params will say so
            rope = read_rope(config, self.model_type)
            self.problems += rope.problems
            params |= self._positions(rope)
            params |= self._moe()
            params |= self._indexer()
        if "quantization_config" in config and config["quantization_config"] is not None:
            params["quantization_config"] = config["quantization_config"]
        if self.problems:
            raise refusal(self.problems, self.where)
        return params

    def _known(self) -> None:
        known = {
            *_EXPERTS,
            *_SAME.values(),
            *_MOE.values(),
            *_FIXED,
            *_FIXED_MOE,
            *_IGNORED,
            *_READ,
        }
        for key in self.config:
            if key not in known:
                text = f"{key}: {shown(self.config[key])}; unknown key, which may change the model"
                self.problems.append(f"{text}. A params.json beside it says what counts")

    def _fixed(self, table: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
        for key, (values, needs) in table.items():
            value = self.config.get(key, values[0])
            if not any(value is one or (value == one and value is not True) for one in values):
                self.problems.append(
                    f"{key}: {shown(value)}; {needs} are not supported: {shown(values[0])}"
                )

    def _eps(self) -> None:
        eps = self.config.get("rms_norm_eps")
        if eps not in (None, 1e-6):
            self.problems.append(
                f"rms_norm_eps: {shown(eps)}; the norms of the latents have 1e-06 whatever it "
                "says, and a layer with two epsilons can't be expressed: 1e-06"
            )

    def _layer_types(self) -> None:
        types = self.config.get("layer_types") or ()
        if other := sorted({str(kind) for kind in types} - _ATTENTION):
            known = " and ".join(sorted(_ATTENTION))
            text = f"layer_types: {shown(other)}; other kinds of attention are not supported: "
            self.problems.append(text + known)

    def _positions(self, rope: Rope) -> dict[str, Any]:
        return rope.params | {"rope_interleave": self.config.get("rope_interleave") is not False}

    def _moe(self) -> dict[str, Any]:
        config, layers = self.config, self.config["num_hidden_layers"]
        first, every = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
        types = config.get("mlp_layer_types")
        if types is not None:
            first = next((n for n, kind in enumerate(types) if kind == "sparse"), layers)
            if list(types) != ["dense"] * first + ["sparse"] * (layers - first):
                self.problems.append(
                    f"mlp_layer_types: {shown(types)}; dense layers come first, then sparse ones, "
                    f"one entry for each of {layers} layers"
                )
                return {}
        count = next((config[key] for key in _EXPERTS if config.get(key) is not None), None)
        if count is None or first >= layers:
            return {}
        if self.model_type not in _SOFTMAX and config.get("scoring_func") != "softmax":
            self.problems.append(
                f"model_type: {self.model_type!r}; its router scores by sigmoid and adds a "
                "correction bias (e_score_correction_bias), which is not supported: softmax"
            )
        self._fixed(_FIXED_MOE)
        shared, width = config.get("n_shared_experts") or 0, config.get("moe_intermediate_size")
        moe = {ours: config.get(theirs) for ours, theirs in _MOE.items()}
        moe = {key: value for key, value in moe.items() if value is not None}
        moe |= {
            "num_experts": count,
            "num_shared_experts": shared,
            "first_k_dense_replace": first,
            "route_every_n": every,
            "renorm_strategy": "WEIGHTS" if config.get("norm_topk_prob", True) else "NONE",
        }
        if shared and isinstance(width, int):
            moe["shared_expert_hidden_dim"] = width * shared
        return {"moe": moe}

    def _indexer(self) -> dict[str, Any]:
        config = self.config
        if self.model_type not in _INDEXED:
            return {}
        for key in ("index_n_heads", "index_head_dim", "index_topk"):
            if config.get(key) is None:
                self.problems.append(f"{key}: missing; it has no default")
        interleave = config.get("indexer_rope_interleave", _INDEXED[self.model_type])
        indexer: dict[str, Any] = {
            "n_heads": config.get("index_n_heads"),
            "head_dim": config.get("index_head_dim"),
            "topk": config.get("index_topk"),
            "query_input": "q_lora",
            "rope_interleave": interleave,
            "q_norm": False,
            "norm_eps": 1e-6,
            "hadamard": False,
            "ssmax": {"kind": "none"},
            "scale_fmt": "ue8m0",
        }
        if config.get("indexer_types") is not None:
            indexer["types"] = list(config["indexer_types"])
        elif config.get("index_topk_pattern") is not None:
            indexer["topk_pattern"] = config["index_topk_pattern"]
        elif config.get("index_topk_freq") is not None:
            offset = config.get("index_skip_topk_offset", 2)
            indexer["topk_pattern"] = {"freq": config["index_topk_freq"], "offset": offset}
        else:
            indexer["types"] = ["full"] * config["num_hidden_layers"]
        return {"indexer": indexer}
