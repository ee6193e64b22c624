"""A params.json with a fault is refused; the message says which key, which value, what works."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from ml4core.models.errors import CheckpointError
from ml4core.models.layer_table import build_model_spec
from ml4core.models.params_file import parse_params


def edited(params: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the key at `a.b` set, or removed if the value is `...`."""
    result = copy.deepcopy(params)
    *blocks, key = path.split(".")
    target = result
    for block in blocks:
        target = target.setdefault(block, {})
    if value is ...:
        del target[key]
    else:
        target[key] = value
    return result


def refusal(params: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        build_model_spec(params)
    return str(caught.value)


def test_right_files_are_accepted(
    small: dict[str, Any], large_3: dict[str, Any], small_4: dict[str, Any]
) -> None:
    for params in (small, large_3, small_4):
        assert parse_params(params).dim == params["dim"]


SHARED_FIRST = ["shared", "full", "shared", "full", "full", "shared", "shared", "full"]
NOPE_SHARES = ["full", "full", "shared", "shared", "full", "shared", "shared", "full"]

FAULTS: list[tuple[str, Any, list[str]]] = [
    # what is set, to what, what the message says
    ("dim", ..., ["dim: missing"]),
    ("dim", "128", ["dim: '128'", "whole number"]),
    ("dim", 128.0, ["dim: 128.0", "whole number"]),
    ("dim", True, ["dim: True", "whole number"]),
    ("dim", 0, ["dim: 0", "1 or more"]),
    ("n_layers", 10**9, ["n_layers: 1000000000", "at most 10000"]),
    ("indexer.topk", 2**40, ["indexer.topk: 1099511627776", "at most 1048576"]),
    ("norm_eps", math.inf, ["norm_eps: inf"]),
    ("norm_eps", 0, ["norm_eps: 0", "above 0"]),
    ("tied_embeddings", 1, ["tied_embeddings: 1", "true or false"]),
    ("kv_lora_rank", None, ["kv_lora_rank: None", "whole number"]),
    ("activation", "gelu", ["activation: 'gelu'", "silu"]),
    ("moe", [], ["moe: []", "object"]),
    # unknown keys, in each closed block
    ("rope_tetha", 1e4, ["rope_tetha: unknown key", "did you mean rope_theta?", "accepted: "]),
    ("yarn.mscale", 1.0, ["yarn.mscale: unknown key", "accepted: original_max", "apply_scale"]),
    ("moe.n_group", 1, ["moe.n_group: unknown key", "num_expert_groups"]),
    ("indexer.top_k", 5, ["indexer.top_k: unknown key", "did you mean topk?"]),
    ("indexer.ssmax.gain", 5, ["indexer.ssmax.gain: unknown key", "per_head"]),
    ("ssmax.s", 1.0, ["ssmax.s: unknown key", "scale"]),
    ("lerope.kind", "log", ["lerope.kind: unknown key", "accepted: storage, scope"]),
    ("llama_4_scaling.alpha", 1, ["llama_4_scaling.alpha: unknown key", "beta"]),
    # widths
    ("head_dim", 64, ["head_dim: 64", "32", "64 is 96"]),
    ("qk_rope_head_dim", 63, ["qk_rope_head_dim: 63 is odd"]),
    ("qk_rope_head_dim", 0, ["qk_rope_head_dim: 0", "nope_layers"]),
    ("n_kv_heads", 2, ["n_kv_heads: 2", "4 (n_heads)"]),
    ("sliding_window", 4096, ["sliding_window: 4096", "null"]),
    ("sliding_window", [None, 4096], ["sliding_window: [None, 4096]"]),
    ("yarn.factor", ..., ["yarn.factor: missing"]),
    ("yarn.factor", 0.5, ["yarn.factor: 0.5", "1.0 or more"]),
    ("yarn.alpha", 32.0, ["yarn.beta: 32.0", "above yarn.alpha, 32.0"]),
    # NoPE layers and shared latents
    ("nope_layers", [3, 8], ["nope_layers: [8]", "layers are 0 to 7"]),
    ("nope_layers", [3, 7, 7], ["nope_layers", "twice"]),
    ("nope_every", 2, ["nope_every: 2", "[1, 3, 5, 7]", "[3, 7]"]),
    ("kv_sharing", {"3": 7}, ["kv_sharing.3: 7", "earlier layer: 0 to 2"]),
    ("kv_sharing", {"7": 7}, ["kv_sharing.7: 7", "earlier layer"]),
    ("kv_sharing", {"8": 3}, ["kv_sharing.8: 3", "0 to 7"]),
    ("kv_sharing", {"7": 2}, ["layer 7 is a NoPE layer, 2 a rope layer"]),
    ("kv_sharing", {"6": 3}, ["layer 6 is a rope layer, 3 a NoPE layer"]),
    ("kv_sharing", {"4": 2, "6": 4}, ["kv_sharing.6: 4 is itself a consumer, of 2"]),
    ("kv_sharing", {"seven": 3}, ["'seven' must be the number of a layer"]),
    ("kv_sharing", {"07": 3}, ["'07' must be the number of a layer"]),
    ("kv_sharing", {"9" * 5000: 3}, ["must be the number of a layer"]),
    ("kv_sharing", {"7": -1}, ["kv_sharing.7: -1", "0 or more"]),
    ("kv_sharing", [[7, 3]], ["kv_sharing: [[7, 3]]", "object"]),
    ("kv_sharing_own_wkv_b", False, ["kv_sharing_own_wkv_b: false is not supported"]),
    # the indexer
    ("indexer.topk", 0, ["indexer.topk: 0", "1 or more"]),
    ("indexer.types", ["full"] * 7, ["indexer.types: 7 entries; n_layers is 8"]),
    ("indexer.types", SHARED_FIRST, ["indexer.types: layer 0 shares", "layer 0 must be full"]),
    ("indexer.types", NOPE_SHARES, ["NoPE layers [3] share", "indexer.nope_owners"]),
    ("indexer.types", ["full", "half"], ["indexer.types.1: 'half'", "'full' or 'shared'"]),
    ("indexer.topk_pattern", "FFSFFSSS", ["differs from indexer.types", "[7] share"]),
    ("indexer.topk_pattern", "FFX", ["indexer.topk_pattern: 'FFX'", "text of F (full)"]),
    ("indexer.topk_pattern", {"freq": 0, "offset": 1}, ["indexer.topk_pattern", "1 or more"]),
    ("indexer.topk_pattern", {"freq": 2}, ["indexer.topk_pattern", "freq", "offset"]),
    ("indexer.head_dim", 32, ["indexer.head_dim: 32", "at least qk_rope_head_dim, 64"]),
    ("indexer.head_dim", ..., ["indexer.head_dim: missing"]),
    ("indexer.query_input", "q_lora", ["'q_lora' needs q_lora_rank", "'hidden' works"]),
    # scaling
    ("ssmax.kind", "sqrt", ["ssmax.kind: 'sqrt'", "'llama4'"]),
    ("ssmax.beta", 0.1, ["ssmax.beta: 0.1 has no meaning for kind 'log'", "scale"]),
    ("ssmax", {"kind": "pow"}, ["ssmax.beta: missing", "ssmax.original_max_position"]),
    ("ssmax", {"kind": "llama4", "bias": True}, ["ssmax.bias: True has no meaning"]),
    (
        "llama_4_scaling",
        {"beta": 0.1, "original_max_position_embeddings": 8192},
        ["ssmax.kind: 'log', but llama_4_scaling", "leave one out"],
    ),
    # experts
    ("moe.num_experts_per_tok", 5, ["num_experts_per_tok: 5; at most moe.num_experts, 4"]),
    ("moe.num_expert_groups", 2, ["moe.num_expert_groups: 2", "not supported: 1"]),
    ("moe.num_expert_groups_per_tok", 2, ["moe.num_expert_groups_per_tok: 2"]),
    ("moe.use_load_balancing_bias", True, ["use_load_balancing_bias: true", "no bias"]),
    ("moe.renorm_strategy", "SCORES", ["renorm_strategy: 'SCORES'", "'WEIGHTS' or 'NONE'"]),
    ("moe.first_k_dense_replace", 9, ["first_k_dense_replace: 9; n_layers is 8"]),
    ("moe.num_shared_experts", 0, ["shared_expert_hidden_dim: stated, but"]),
    # taps
    ("mtp.target_layers", [1, 8], ["mtp.target_layers: [1, 8]", "0 to 7"]),
    ("mtp.target_layers", [1, 1], ["mtp.target_layers: [1, 1] names a layer twice"]),
    ("mtp.target_layers", "1", ["mtp.target_layers: '1'", "list of layers"]),
    ("mtp.taps", [1], ["mtp.taps: differs from mtp.target_layers"]),
]


@pytest.mark.parametrize(
    ("path", "value", "says"), FAULTS, ids=[f"{path}={value!r:.40}" for path, value, _ in FAULTS]
)
def test_a_fault_is_named(small: dict[str, Any], path: str, value: Any, says: list[str]) -> None:
    build_model_spec(small)  # right without the edit
    message = refusal(edited(small, path, value))
    for text in says:
        assert text in message


def test_positions_must_be_stated(small: dict[str, Any]) -> None:
    for key in ("max_position_embeddings", "yarn"):
        del small[key]
    assert "max_position_embeddings: missing; state it, max_seq_len, or yarn" in refusal(small)


def test_two_forms_of_one_scaling_may_agree_and_may_not_differ(large_3: dict[str, Any]) -> None:
    large_3["ssmax"] = {"kind": "llama4", "beta": 0.1}
    assert build_model_spec(large_3).layers[0].ssmax.kind == "llama4"
    large_3["ssmax"]["beta"] = 0.2
    assert "ssmax.beta: 0.2, but llama_4_scaling.beta is 0.1" in refusal(large_3)


def test_selection_limit_needs_an_indexer(large_3: dict[str, Any]) -> None:
    del large_3["llama_4_scaling"]
    large_3["ssmax"] = {"kind": "log", "scale": 0.2, "n": "topk", "per_head": False}
    assert "ssmax.n: 'topk' needs an indexer block" in refusal(large_3)


def test_independent_faults_come_in_one_error(small: dict[str, Any]) -> None:
    small["yarn"]["mscale"] = 1
    small["moe"]["num_experts_per_tok"] = 9
    small["n_kv_heads"] = 3
    small["kv_sharing"] = {"7": 3, "3": 5}
    del small["vocab_size"], small["dim"]
    message = refusal(small)
    for text in (
        "yarn.mscale: unknown key",
        "moe.num_experts_per_tok: 9",
        "n_kv_heads: 3",
        "dim: missing",
        "kv_sharing.3: 5; a consumer reads an earlier layer",
        "kv_sharing.7: 3 is itself a consumer",
        "layer 3 is a NoPE layer, 5 a rope layer",
    ):
        assert text in message
    assert message.startswith("params.json: 7 problems")
    assert len(message.splitlines()) == 8


def test_what_depends_on_a_wrong_key_is_not_guessed_at(small: dict[str, Any]) -> None:
    small["n_layers"] = "8"
    assert refusal(small).splitlines() == [
        "params.json: 1 problem",
        "  - n_layers: '8'; must be a whole number",
    ]


def test_messages_stay_short(small: dict[str, Any]) -> None:
    small["dim"] = "x" * 100_000
    assert len(refusal(small)) < 500


def test_the_file_is_named(small: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"^/models/a/params\.json: 1 problem"):
        parse_params(small | {"dim": 0}, "/models/a/params.json")


def test_blocks_of_other_parts_are_free(small: dict[str, Any]) -> None:
    small["quantization_config"] = {"anything": [1, {"nested": None}]}
    small["multimodal"] = {"whisper_model_args": {}}
    extras = build_model_spec(small).extras
    assert extras["quantization_config"] == {"anything": [1, {"nested": None}]}
    assert extras["multimodal"] == {"whisper_model_args": {}}
    assert extras["mtp"] == {"target_layers": [1, 4, 7]}
