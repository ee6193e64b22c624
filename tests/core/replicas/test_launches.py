"""Launches that are unlike are refused on all replicas, with all that differs; before any weight is
read, and any group of ranks is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ml4core.api import Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.engine.replicas.launch import address_of
from ml4core.engine.replicas.launch import refusals as own_refusals
from ml4core.registry import Choice

LIMIT_S = 60.0


@pytest.fixture
def refusals(
    folder: Path, choice: Choice, free_port: Callable[[], int]
) -> Callable[..., list[dict[str, str]]]:
    """What two launches are refused for, by subject."""
    port = free_port()

    def found(*launches: dict[str, Any]) -> list[dict[str, str]]:
        told: list[dict[str, str]] = [{}, {}]

        def launch(rank: int) -> None:
            flags: dict[str, Any] = {
                "data_parallel_size": 2,
                "data_parallel_start_rank": rank,
                "data_parallel_rpc_port": port,
            }
            flags |= {"model": str(folder)} | launches[rank]
            args = EngineArgs(backend="cpu", **flags)
            try:
                open_engine(args, choice=choice, serves=True).close()
            except Refused as refused:
                told[rank] = {one.subject: one.reason for one in refused.refusals}

        threads = [threading.Thread(target=launch, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not dist.is_initialized()
        return told

    return found


def test_flags_and_types(refusals: Callable[..., list[dict[str, str]]]) -> None:
    here, there = refusals(
        {"enable_expert_parallel": True, "max_num_seqs": 4},
        {"tensor_parallel_size": 2, "max_num_seqs": 3, "dtype": "bfloat16"},
    )
    assert here == there
    assert here["--max-num-seqs"] == "replicas differ: 4 on replica 0; 3 on replica 1"
    assert here["--tensor-parallel-size"] == "replicas differ: 1 on replica 0; 2 on replica 1"
    assert here["--dtype"] == "replicas differ: float32 on replica 0; bfloat16 on replica 1"
    assert "--enable-expert-parallel" in here
    assert "--block-size" not in here


def test_models(refusals: Callable[..., list[dict[str, str]]]) -> None:
    """Whatever folder each has its own in."""
    flags = {"max_model_len": 64, "enable_expert_parallel": True}
    here, there = refusals(flags, flags | {"model": "ml4-tiny"})
    assert here == there
    assert "a table of 2 layers (" in here["the model"]
    assert "the bytes of the weights" in here
    assert "--max-model-len" not in here


@pytest.mark.parametrize(
    ("flags", "subject", "reason"),
    [
        ({}, "--data-parallel-size 4", "nothing says which of 4 replicas this launch is"),
        (
            {"data_parallel_size_local": 2, "data_parallel_start_rank": 2},
            "--data-parallel-size-local 2",
            "2 replicas behind one server",
        ),
    ],
)
def test_a_launch_is_one_replica(flags: dict[str, Any], subject: str, reason: str) -> None:
    (refusal,) = own_refusals(EngineArgs("m", data_parallel_size=4, **flags))
    assert refusal.subject == subject
    assert reason in refusal.reason
    assert "--data-parallel-size-local 1 with --data-parallel-start-rank 0 to 3" in refusal.remedy


def test_where_replicas_meet() -> None:
    assert address_of(EngineArgs("m", data_parallel_address="h")) == ("", 0)
    assert address_of(EngineArgs("m", data_parallel_size=2)) == ("127.0.0.1", 29550)
