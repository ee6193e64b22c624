"""The published launches of the model: each parses, and what has not landed is refused by name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.planning.launch import judge

pytestmark = pytest.mark.usefixtures("probed_once")

MODEL = "mistralai/Mistral-Large-4-1T-A52B"
DRAFT = """--speculative-config '{"method": "dspark", "num_speculative_tokens": 3}'"""
TOOLS = "--tool-call-parser mistral --enable-auto-tool-choice --reasoning-parser mistral"
EIGHT = f"{MODEL} --tensor-parallel-size 8 {DRAFT} {TOOLS}"
NODES = "--nnodes 2 --master-addr NODE0 --distributed-executor-backend mp"
HOST_POOL = """--kv-transfer-config '{"kv_connector": "HiSparseConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_pool_gib": 440}}'"""
LATENCY = """--additional-config '{"decode_backend": "latency_specialized"}' --max-num-seqs 64"""
REPLICAS = f"""{MODEL} --tensor-parallel-size 8 --data-parallel-size 4 --data-parallel-size-local 1
    --data-parallel-address 10.0.0.1 --data-parallel-rpc-port 29696 --enable-expert-parallel
    --enable-ep-weight-filter --dtype bfloat16 --kv-cache-dtype fp8_e4m3"""

DRAFT_CONFIG = {"method": "dspark", "num_speculative_tokens": 3}
SERVER = {
    "tool_call_parser": "mistral",
    "enable_auto_tool_choice": True,
    "reasoning_parser": "mistral",
}
EIGHT_VALUES = {"tensor_parallel_size": 8, "speculative_config": DRAFT_CONFIG, **SERVER}
NODE_VALUES = {
    "nnodes": 2,
    "master_addr": "NODE0",
    "distributed_executor_backend": "mp",
}
REPLICA_VALUES = {
    "tensor_parallel_size": 8,
    "data_parallel_size": 4,
    "data_parallel_size_local": 1,
    "data_parallel_address": "10.0.0.1",
    "data_parallel_rpc_port": 29696,
    "enable_expert_parallel": True,
    "enable_ep_weight_filter": True,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8_e4m3",
}

SERVER_FLAGS = {
    "--tool-call-parser mistral",
    "--enable-auto-tool-choice",
    "--reasoning-parser mistral",
}
NODE_FLAGS = {"--nnodes", "--master-addr"}

LAUNCHES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "eight devices": (EIGHT, EIGHT_VALUES, SERVER_FLAGS),
    "two nodes of four, node 0": (
        f"{EIGHT} {NODES} --node-rank 0",
        EIGHT_VALUES | NODE_VALUES,
        SERVER_FLAGS | NODE_FLAGS,
    ),
    "two nodes of four, node 1": (
        f"{EIGHT} {NODES} --node-rank 1 --headless",
        EIGHT_VALUES | NODE_VALUES | {"node_rank": 1, "headless": True},
        SERVER_FLAGS | NODE_FLAGS | {"--node-rank", "--headless"},
    ),
    "nvfp4": (
        f"{MODEL}-NVFP4 --tensor-parallel-size 8 {DRAFT}",
        {"tensor_parallel_size": 8, "speculative_config": DRAFT_CONFIG},
        set(),
    ),
    "long context": (
        f"{EIGHT} --decode-context-parallel-size 8",
        EIGHT_VALUES | {"decode_context_parallel_size": 8},
        SERVER_FLAGS | {"--decode-context-parallel-size"},
    ),
    "images": (
        f"""{EIGHT} --limit-mm-per-prompt '{{"image": 4}}'""",
        EIGHT_VALUES | {"limit_mm_per_prompt": {"image": 4}},
        SERVER_FLAGS,
    ),
    "host offload": (
        f"{EIGHT} {HOST_POOL}",
        EIGHT_VALUES
        | {
            "kv_transfer_config": {
                "kv_connector": "HiSparseConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"host_pool_gib": 440},
            }
        },
        SERVER_FLAGS | {"--kv-transfer-config"},
    ),
    "four devices, specialised decode": (
        f"{MODEL} --tensor-parallel-size 4 {DRAFT} {TOOLS} {LATENCY}",
        EIGHT_VALUES
        | {
            "tensor_parallel_size": 4,
            "additional_config": {"decode_backend": "latency_specialized"},
            "max_num_seqs": 64,
        },
        SERVER_FLAGS,
    ),
    "bfloat16 cache": (
        f"{EIGHT} --kv-cache-dtype bfloat16",
        EIGHT_VALUES | {"kv_cache_dtype": "bfloat16"},
        SERVER_FLAGS,
    ),
    "replicas over hosts, host 0": (
        f"{REPLICAS} --data-parallel-start-rank 0",
        REPLICA_VALUES | {"data_parallel_start_rank": 0},
        set(),
    ),
    "replicas over hosts, host 3": (
        f"{REPLICAS} --data-parallel-start-rank 3",
        REPLICA_VALUES | {"data_parallel_start_rank": 3},
        set(),
    ),
}

LACKING = {"four devices, specialised decode": {"feature:latency_decode"}}
"""What the backend can't do that is taken where no other is asked for."""
WORDS = {
    "--decode-context-parallel-size": "parallel:dcp",
    "--nnodes": "parallel:multi_node",
    "--kv-transfer-config": "feature:host_offload",
}
"""By flag, what of a backend it needs, and this one lacks, too."""


@pytest.mark.parametrize("launch", LAUNCHES)
def test_parses_and_is_refused_by_name(parse: Callable[..., EngineArgs], launch: str) -> None:
    line, values, refused = LAUNCHES[launch]
    model, *words = shlex.split(line)
    args = parse(model, *words)
    assert args == EngineArgs(model, **values)
    assert {refusal.subject for refusal in args.refusals()} == refused


@pytest.mark.parametrize("launch", [name for name, one in LAUNCHES.items() if one[2]])
def test_generate_refuses_with_all_reasons_before_it_looks_for_the_model(
    ml4: Any, launch: str
) -> None:
    line, _, refused = LAUNCHES[launch]
    done = ml4("generate", *shlex.split(line), "--prompt", "x")
    assert (done.code, done.out) == (3, "")
    for subject in refused:
        assert f"  - [core] {subject}: " in done.err
    assert done.err.count("  - [") == len(refused)


def reasons(launch: str) -> set[str]:
    """What a server refuses on the cpu backend."""
    refused = LAUNCHES[launch][2] - SERVER_FLAGS | LACKING.get(launch, set())
    return refused | {WORDS[flag] for flag in refused & WORDS.keys()}


@pytest.mark.parametrize("launch", [name for name in LAUNCHES if reasons(name)])
def test_the_server_refuses_what_has_not_landed_and_its_own_flags_never(
    ml4: Any, launch: str
) -> None:
    done = ml4("serve", *shlex.split(LAUNCHES[launch][0]), "--backend", "cpu", "--dry-run")
    assert done.code == 3
    told = json.loads(done.out)
    assert {one["subject"] for one in told["refusals"]} == reasons(launch)
    assert told["plan"] is None or told["plan"]["weights"]["rank"] > 2**30
    for subject in reasons(launch):
        assert f"  - [core] {subject}: " in done.err
    assert done.err.count("  - [") == len(reasons(launch))


@pytest.mark.parametrize("launch", [name for name in LAUNCHES if not reasons(name)])
def test_what_has_landed_is_planned(launch: str) -> None:
    _, values, _ = LAUNCHES[launch]
    flags = {name: one for name, one in values.items() if name not in SERVER}
    nvfp4 = "-NVFP4" if launch == "nvfp4" else ""
    judged = judge(EngineArgs(f"{MODEL}{nvfp4}", backend="cpu", **flags), {})
    assert judged.refusals == ()
    assert judged.plan is not None
    assert judged.deployment is not None
    assert judged.deployment.tensor_parallel_size == 8
    if "data_parallel_size" in values:
        assert judged.deployment.data_parallel_rank == values["data_parallel_start_rank"]
        assert judged.deployment.data_parallel_runtime_address == "10.0.0.1:29697"


def test_a_batch_is_no_replica(ml4: Any) -> None:
    line, _, _ = LAUNCHES["replicas over hosts, host 3"]
    done = ml4("generate", *shlex.split(line), "--prompt", "x")
    assert done.code == 3
    assert "--data-parallel-size 4: an engine for a batch steps only while it has one" in done.err
    assert "(works: ml4 serve, or AsyncLLM)" in done.err
