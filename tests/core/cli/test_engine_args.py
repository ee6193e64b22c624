"""EngineArgs: every value checked, every relation kept, what has not landed refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from ml4core import __version__
from ml4core.engine.args import FLAGS, EngineArgs
from ml4core.engine.errors import ArgumentsError


def problems(model: str = "m", **values: Any) -> tuple[str, ...]:
    with pytest.raises(ArgumentsError) as caught:
        EngineArgs(model, **values)
    return caught.value.problems


def refused(**values: Any) -> list[str]:
    return [refusal.subject for refusal in EngineArgs("m", **values).refusals()]


def test_every_field_but_the_model_is_a_flag() -> None:
    names = [field.name for field in dataclasses.fields(EngineArgs) if field.name != "model"]
    assert names == list(FLAGS)
    defaults = EngineArgs("m")
    assert {name: getattr(defaults, name) for name in names} == {
        name: flag.default for name, flag in FLAGS.items()
    }


def test_defaults_are_well_formed_and_served() -> None:
    args = EngineArgs("m")
    assert args.refusals() == []
    assert args == EngineArgs("m")
    assert hash(args) == hash(EngineArgs("m"))


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineArgs("m").seed = 1  # type: ignore[misc]


COUNTS = [
    name
    for name, flag in FLAGS.items()
    if flag.kind is int and flag.minimum == 1 and not flag.units
]


@pytest.mark.parametrize("name", [*COUNTS, "max_model_len", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2**31, True, 1.0, "1", math.nan])
def test_counts_start_at_one(name: str, value: Any) -> None:
    (problem,) = problems(**{name: value})
    assert problem.startswith(f"{FLAGS[name].name}: ")
    assert repr(value) in problem


@pytest.mark.parametrize(
    ("name", "last", "over"),
    [
        ("master_port", 65535, 65536),
        ("data_parallel_rpc_port", 65535, 65536),
        ("gpu_memory_utilization", 1.0, 1.0001),
        ("gpu_memory_utilization", 1e-9, 0.0),
        ("seed", 0, -1),
        ("seed", 2**63 - 1, 2**63),
        ("kv_cache_memory_bytes", 2**63 - 1, 2**63),
        ("max_model_len", 2**31 - 1, 2**31),
        ("node_rank", 0, -1),
        ("data_parallel_start_rank", 0, -1),
        ("block_size", 1, 0),
    ],
)
def test_ranges_end_where_they_say(name: str, last: Any, over: Any) -> None:
    """B106: the last value that works, and one over."""
    assert getattr(EngineArgs("m", **{name: last}), name) == last
    (problem,) = problems(**{name: over})
    assert problem.startswith(f"{FLAGS[name].name}: {over!r} is out of range; works: ")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_share_of_memory_is_a_number(value: float) -> None:
    assert len(problems(gpu_memory_utilization=value)) == 1


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.choices])
def test_choices_are_closed(name: str) -> None:
    for value in ("other", ""):
        (problem,) = problems(**{name: value})
        assert all(choice in problem for choice in FLAGS[name].choices)


def test_all_faults_come_at_once() -> None:
    found = problems(" ", block_size=0, seed=-1, kv_cache_dtype="fp4", speculative_config=[1])
    assert [problem.split(":")[0] for problem in found] == [
        "MODEL",
        "--kv-cache-dtype",
        "--block-size",
        "--seed",
        "--speculative-config",
    ]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"nnodes": 2, "distributed_executor_backend": "ray", "tensor_parallel_size": 2}, "mp"),
        ({"nnodes": 3, "tensor_parallel_size": 8}, "divide the 8 ranks"),
        ({"node_rank": 1}, "0 to 0"),
        (
            {"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2, "headless": True},
            "0 to 1",
        ),
        ({"nnodes": 2, "tensor_parallel_size": 2, "headless": True}, "node 0 hosts"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "--headless"),
        ({"headless": True}, "answer nobody"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "more than"),
        ({"data_parallel_size": 4, "data_parallel_start_rank": 4}, "0 to 3"),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_start_rank": 3,
            },
            "0 to 2",
        ),
        ({"enable_ep_weight_filter": True}, "--enable-expert-parallel"),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 8},
            "works: mp, with --tensor-parallel-size 8",
        ),
        ({"enable_auto_tool_choice": True}, "--tool-call-parser"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 3}, "divide"),
        (
            {
                "tensor_parallel_size": 4,
                "prefill_context_parallel_size": 2,
                "decode_context_parallel_size": 4,
            },
            "works: 1, 2, 8",
        ),
        ({"dcp_comm_backend": "a2a"}, "--decode-context-parallel-size"),
        ({"dcp_q_replicate": True}, "--decode-context-parallel-size"),
        ({"cp_kv_cache_interleave_size": 2}, "--decode-context-parallel-size"),
        (
            {
                "tensor_parallel_size": 2,
                "decode_context_parallel_size": 2,
                "cp_kv_cache_interleave_size": 48,
                "block_size": 64,
            },
            "--block-size 64",
        ),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "--max-num-seqs 9"),
    ],
)
def test_relations(values: dict[str, Any], named: str) -> None:
    (problem,) = problems(**values)
    assert named in problem


def test_all_broken_relations_come_at_once() -> None:
    found = problems(
        nnodes=3,
        node_rank=3,
        tensor_parallel_size=8,
        distributed_executor_backend="ray",
        decode_context_parallel_size=5,
        enable_ep_weight_filter=True,
    )
    assert len(found) == 6


LANDED = {
    "speculative_config": {"method": "dspark", "draft_sample_method": "greedy"},
    "backend": "other",
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8_ds_mla",
    "block_size": 16,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "kv_cache_memory_bytes": 1,
    "num_gpu_blocks_override": 2,
    "gpu_memory_utilization": 0.5,
    "cudagraph_capture_sizes": (1, 2),
    "enforce_eager": True,
    "seed": 1,
    "tokenizer": "t",
    "load_format": "safetensors",
    "attention_config": {"mla_form": "unabsorbed", "index_layout": "x-dist/mine"},
    "additional_config": {"device": "interpreted"},
    "revision": "r",
    "download_dir": "d",
    "enable_prefix_caching": True,
    "async_scheduling": True,
    "scheduling_policy": "priority",
    "step_timeout_s": 60.0,
    "limit_mm_per_prompt": {"image": 1},
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_ep_weight_filter": True,
    "data_parallel_size": 2,
    "data_parallel_size_local": 1,
    "data_parallel_start_rank": 0,
    "data_parallel_address": "h",
    "data_parallel_rpc_port": 1,
}
NOT_LANDED = {
    "tokenizer_mode": "hf",
    "quantization": "fp8",
    "pipeline_parallel_size": 2,
    "prefill_context_parallel_size": 2,
    "nnodes": 1 << 1,
    "master_addr": "h",
    "master_port": 1,
    "distributed_executor_backend": "ray",
    "kv_transfer_config": {"kv_role": "kv_both"},
    "attention_backend": "a",
    "compilation_config": {"mode": 3},
}
SERVER_ALONE = {
    "served_model_name": ("a",),
    "tool_call_parser": "mistral",
    "enable_auto_tool_choice": True,
    "reasoning_parser": "mistral",
}
NEEDS_OTHERS = {
    "decode_context_parallel_size": {"tensor_parallel_size": 2},
    "dcp_comm_backend": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "dcp_q_replicate": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "cp_kv_cache_interleave_size": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "node_rank": {"nnodes": 2, "tensor_parallel_size": 2, "headless": True},
    "headless": {"data_parallel_size": 2, "data_parallel_start_rank": 1},
}
VALUES = {
    "decode_context_parallel_size": 2,
    "dcp_comm_backend": "a2a",
    "dcp_q_replicate": True,
    "cp_kv_cache_interleave_size": 2,
    "node_rank": 1,
    "headless": True,
}


def test_each_flag_is_listed_as_landed_or_not() -> None:
    listed = LANDED.keys() | NOT_LANDED.keys() | NEEDS_OTHERS.keys() | SERVER_ALONE.keys()
    assert listed == FLAGS.keys()


@pytest.mark.parametrize("name", LANDED)
def test_landed_flags_are_served(name: str) -> None:
    more = {"enable_expert_parallel": True} if name == "enable_ep_weight_filter" else {}
    assert refused(**{name: LANDED[name]}, **more) == []


@pytest.mark.parametrize("name", NOT_LANDED)
def test_flags_of_missing_parts_are_refused_by_name(name: str) -> None:
    more = {"tensor_parallel_size": 2} if name == "nnodes" else {}
    found = EngineArgs("m", **{name: NOT_LANDED[name]}, **more).refusals()
    (refusal,) = [r for r in found if r.subject.split()[0] == FLAGS[name].name]
    assert refusal.source == "core"
    assert refusal.reason.endswith(f"has not landed in ml4core {__version__}")
    assert refusal.remedy


@pytest.mark.parametrize("name", SERVER_ALONE)
def test_flags_of_a_server_are_refused_elsewhere(name: str) -> None:
    found = EngineArgs("m", **{"tool_call_parser": "mistral", name: SERVER_ALONE[name]}).refusals()
    (refusal,) = [r for r in found if r.subject.split()[0] == FLAGS[name].name]
    assert refusal.reason == "only a server looks at it: ml4 serve"


@pytest.mark.parametrize("name", NEEDS_OTHERS)
def test_flags_that_need_others_are_refused_beside_them(name: str) -> None:
    subjects = {s.split()[0] for s in refused(**NEEDS_OTHERS[name], **{name: VALUES[name]})}
    assert FLAGS[name].name in subjects
    others = NEEDS_OTHERS[name].keys() - LANDED.keys()
    assert {FLAGS[other].name for other in others} <= subjects


@pytest.mark.parametrize(
    "values",
    [
        {"tensor_parallel_size": 1, "nnodes": 1, "node_rank": 0, "enable_prefix_caching": False},
        {"limit_mm_per_prompt": {"image": 0, "audio": 0}},
        {"limit_mm_per_prompt": {"image": {"count": 0}}},
        {"speculative_config": {}, "kv_transfer_config": {}, "compilation_config": {}},
        {"scheduling_policy": "fcfs", "tokenizer_mode": "mistral"},
        {"distributed_executor_backend": "uni"},
        {"distributed_executor_backend": "mp", "tensor_parallel_size": 2},
    ],
)
def test_values_that_ask_for_nothing_pass(values: dict[str, Any]) -> None:
    assert refused(**values) == []


@pytest.mark.parametrize("value", FLAGS["kv_cache_dtype"].choices)
def test_every_cache_dtype_is_left_to_the_backend(value: str) -> None:
    assert refused(kv_cache_dtype=value) == []


def test_float16_is_refused_with_a_reason_of_its_own() -> None:
    (refusal,) = EngineArgs("m", dtype="float16").refusals()
    assert refusal.subject == "--dtype float16"
    assert "has not landed" not in refusal.reason
    assert refusal.remedy == "auto, bfloat16, float32"


def test_unknown_keys_of_landed_json_flags_are_refused_by_name() -> None:
    assert refused(
        additional_config={"device": "fake", "decode_backends": "latency_specialized"},
        attention_config={"use_trick": True},
    ) == ["--attention-config use_trick", "--additional-config decode_backends"]


@pytest.mark.parametrize(
    ("values", "works"),
    [
        ({"attention_config": {"mla_form": "both"}}, "absorbed or unabsorbed"),
        ({"attention_config": {"index_layout": "foo"}}, "planar_f32"),
        ({"attention_config": {"index_layout": 3}}, "x-<distribution>/<name>"),
        ({"additional_config": {"device": True}}, "real or interpreted or fake or source"),
        ({"additional_config": {"fp8_moe_requant": "nvfp4"}}, "works: mxfp4"),
        ({"additional_config": {"fp8_moe_requant_rule": "best"}}, "even or floor or roundup"),
        ({"additional_config": {"cpu": 3}}, "works: a JSON object"),
    ],
)
def test_values_of_known_keys_are_checked(values: dict[str, Any], works: str) -> None:
    (problem,) = problems(**values)
    assert works in problem


@pytest.mark.parametrize(
    ("config", "works"),
    [
        ({"cudagraph_mode": "PIECEWISE"}, "NONE or FULL_DECODE_ONLY"),
        ({"cudagraph_capture_sizes": [1, 0]}, "a list of whole numbers"),
        ({"cudagraph_capture_sizes": 4}, "a list of whole numbers"),
        ({"cudagraph_capture_sizes": [True]}, "a list of whole numbers"),
    ],
)
def test_settings_of_capture_are_checked(config: dict[str, Any], works: str) -> None:
    (problem,) = problems(compilation_config=config)
    assert problem.startswith("--compilation-config: ")
    assert works in problem


def test_sizes_to_capture_are_said_once() -> None:
    sizes = {"cudagraph_capture_sizes": [1, 2]}
    assert refused(compilation_config=sizes | {"cudagraph_mode": "FULL_DECODE_ONLY"}) == []
    (problem,) = problems(cudagraph_capture_sizes=(1,), compilation_config=sizes)
    assert problem.startswith("--cudagraph-capture-sizes: ")


def test_caches_are_sized_once() -> None:
    (problem,) = problems(num_gpu_blocks_override=9, kv_cache_memory_bytes=9)
    assert "works: one of them" in problem
