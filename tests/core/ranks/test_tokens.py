"""Ranks together make the tokens that one makes alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.ranks.packing import pack
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.errors import CheckpointError

pytestmark = pytest.mark.multiprocess

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5] * 20, [7, 8, 9], list(range(100, 140))]
REQUANT: dict[str, Any] = {"fp8_moe_requant": "mxfp4"}
DRAFTS: dict[str, Any] = {"method": "dspark"}
Start = Callable[..., Engine]


def tokens(engine: Engine) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """What one rank makes."""
    args = EngineArgs(str(folder), backend="cpu", max_model_len=96, block_size=16)
    engine = open_engine(args, sequences=4, tokens_each=64)
    found = tokens(engine)
    engine.close()
    return found


def test_preemption_and_cached_prefixes(start: Start, alone: Any) -> None:
    engine = start(num_gpu_blocks_override=7, enable_prefix_caching=True)
    assert tokens(engine) == alone
    assert engine.core.stats().preemptions
    engine.core.overlap = True  # a step stays in flight
    assert tokens(engine) == alone
    assert engine.core.stats().cache_hits["latent"]
    told = engine.report()["parallel"]
    assert not told["enable_expert_parallel"]
    assert [one["device"] for one in told["ranks"]] == ["cpu", "cpu"]
    assert told["ranks"][0]["process"] == os.getpid()
    assert told["sums"] == "torch.distributed (gloo)"


def test_whole_experts_on_each_rank(
    start: Start, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are broadcast, as those of a device are."""

    def without_data(tensors: Any) -> Any:
        packed, _ = pack(tensors)
        data = torch.frombuffer(bytearray(packed.data or b""), dtype=torch.uint8)
        return packed._replace(data=None), data

    monkeypatch.setattr("ml4core.engine.ranks.runner.pack", without_data)
    flags = {"enable_expert_parallel": True, "enable_ep_weight_filter": True}
    engine = start(**flags, max_num_batched_tokens=7, step_timeout_s=0.0)
    assert tokens(engine) == alone
    assert engine.report()["parallel"]["enable_expert_parallel"]


def test_drafts_and_experts_that_are_converted(start: Start) -> None:
    """The shipped model, whose experts are too narrow to be cut as they are stored."""
    flags = {"additional_config": REQUANT, "max_model_len": 96}
    first = start("ml4-tiny", ranks=1, **flags)
    want = tokens(first)
    engine = start("ml4-tiny", speculative_config=DRAFTS, **flags)
    assert tokens(engine) == want
    counts = engine.core.stats().drafts
    assert counts is not None
    assert sum(counts.accepted) > 0


def test_a_size_that_cuts_no_matrix_is_told_with_those_that_do(start: Start) -> None:
    with pytest.raises(CheckpointError) as told:
        start("ml4-tiny")
    assert "can't be cut for tensor parallel size 2" in str(told.value)
    assert "TP sizes that work for every tensor: 1" in str(told.value)
    assert "2 works with --enable-expert-parallel" in str(told.value)
    with pytest.raises(CheckpointError, match=r"3 ranks .*TP sizes that work"):
        start(ranks=3)
