"""A dry run says all that a start would say, and plans with what it would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ml4core import registry
from ml4core.api import Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError, RequestError
from ml4core.models.errors import CheckpointError
from ml4core.serving.dry_run import dry_run
from ml4core.serving.opening import open_for_any

pytestmark = pytest.mark.usefixtures("probed_once")

DRAFTS = {"method": "dspark"}
BAD: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ranks of contexts": {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2},
    "experts": {"enable_expert_parallel": True, "data_parallel_size": 2},
    "pages": {"block_size": 48, "kv_cache_dtype": "fp8", "async_scheduling": True},
    "offload": {
        "kv_transfer_config": {"kv_connector": "HiSparseConnector", "kv_role": "kv_both"},
        "async_scheduling": True,
    },
    "transfer": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
    "drafts": {"speculative_config": DRAFTS | {"num_speculative_tokens": 40}, "max_num_seqs": 2},
    "decode": {"additional_config": {"decode_backend": "latency_specialized"}},
    "switches": {
        "additional_config": {"fp8_moe_requant": "mxfp4", "fp8_moe_requant_act": "a4w4"},
        "dtype": "bfloat16",
    },
    "a private layout": {"kv_cache_dtype": "x-nobody/rows"},
    "a private index": {"attention_config": {"index_layout": "x-nobody/rows"}},
    "a long context": {"max_model_len": 10**8},
    "few bytes": {"kv_cache_memory_bytes": 1000, "speculative_config": DRAFTS},
    "a device": {"kv_cache_memory_bytes": 2**60},
    "images": {"limit_mm_per_prompt": {"image": 2}},
}


@pytest.fixture(scope="module")
def choice() -> registry.Choice:
    return registry.select("cpu")


def reasons(call: Callable[[], Any]) -> set[str]:
    """What it raises, a text for each reason."""
    try:
        call()
    except Refused as refused:
        return {str(one) for one in refused.refusals}
    except (ArgumentsError, CheckpointError, RequestError) as error:
        return {str(error)}
    return set()


@pytest.mark.parametrize("name", BAD)
def test_what_a_start_would_say(
    monkeypatch: pytest.MonkeyPatch, choice: registry.Choice, name: str
) -> None:
    monkeypatch.setattr(registry, "select", lambda name, **more: choice)
    args = EngineArgs("ml4-tiny", backend="cpu", **{"max_model_len": 512} | BAD[name])
    real = reasons(lambda: open_for_any(args))
    found = reasons(lambda: dry_run(args))
    assert real, "it starts"
    if name == "images":  # in other words
        assert "--limit-mm-per-prompt" in "".join(real)
        assert "--limit-mm-per-prompt" in "".join(found)
    else:
        assert real <= found


def test_fewer_devices_than_ranks(monkeypatch: pytest.MonkeyPatch, choice: registry.Choice) -> None:
    (found,) = choice.devices
    one = replace(found, device=replace(found.device, torch_device="cuda:0"))
    few = replace(choice, devices=(one,))
    monkeypatch.setattr(registry, "select", lambda name, **more: few)
    args = EngineArgs("ml4-tiny", backend="cpu", max_model_len=512, tensor_parallel_size=2)
    (told,) = reasons(lambda: open_for_any(args))
    assert "--tensor-parallel-size 2: 2 ranks need 2 devices, and there are 1: cuda:0" in told
    found_too = reasons(lambda: dry_run(args))
    assert told in found_too


def test_the_backends_own_numbers_are_planned(
    monkeypatch: pytest.MonkeyPatch, choice: registry.Choice
) -> None:
    monkeypatch.setattr(registry, "select", lambda name, **more: choice)
    args = EngineArgs("ml4-tiny", backend="cpu", max_model_len=512)
    plan = dry_run(args)["plan"]
    own = choice.capabilities.defaults
    assert plan["dtype"] == own["dtype"] == "float32"
    assert plan["kv"]["layout"] == own["kv"] == "fp32"
    assert plan["limits"]["max_num_seqs"] == int(own["max_num_seqs"])
    assert plan["limits"]["max_num_batched_tokens"] == int(own["max_num_batched_tokens"])
    assert not {"drafter", "vision"} & {p["part"] for p in plan["weights"]["parts"] if p["loaded"]}


def test_the_least_bytes_of_caches_are_enough(
    monkeypatch: pytest.MonkeyPatch, choice: registry.Choice
) -> None:
    """With drafts, whose windows are for all sequences: what the error names can be served."""
    monkeypatch.setattr(registry, "select", lambda name, **more: choice)

    def start(nbytes: int) -> set[str]:
        args = EngineArgs(
            "ml4-tiny",
            backend="cpu",
            max_model_len=128,
            max_num_seqs=5,
            speculative_config=DRAFTS,
            kv_cache_memory_bytes=nbytes,
        )
        return reasons(lambda: open_for_any(args).engine.close()) or reasons(lambda: dry_run(args))

    (told,) = start(1000)
    least = int(told.partition("at least ")[2].split()[0])
    assert "the drafts of 5" in told
    assert start(least) == set()
    (told,) = start(least - 1)
    assert f"at least {least} " in told
