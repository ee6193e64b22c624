"""Steps as CUDA graphs on a GPU: what is replayed is what would have run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import Segment, StepBuckets, StepOutput, StepPlan, StepShape
from ml4core_triton.executor import GraphExecutor
from ml4core_triton.fault import FaultWord
from ml4core_triton.graphs import DeviceGraphs, alias

pytestmark = pytest.mark.accelerator

NONE = Segment(0, 0, 0)


def plan(rows: int, first: int, device: torch.device) -> StepPlan:
    shape = StepShape(Segment(rows, rows, 1), NONE, NONE, (("latent", 2),), rows)
    ints = torch.arange(first, first + rows, device=device)
    return StepPlan(
        shape,
        ints,
        ints + 1,
        torch.arange(rows, device=device),
        torch.arange(rows + 1, device=device).int(),
        ints.int(),
        {"latent": torch.zeros(rows, 2, device=device).int()},
        {"latent": ints * 2},
        torch.arange(rows, device=device),
    )


@pytest.fixture
def executor(device: torch.device) -> GraphExecutor:
    if device.type != "cuda":
        pytest.skip("needs an NVIDIA GPU")
    buckets = StepBuckets(decode=(1, 2, 4), pages=(1, 2), logits=(1, 2, 4))
    return GraphExecutor(DeviceGraphs(device), buckets, FaultWord(device))


@pytest.mark.parametrize("broken", [False, True])
def test_replays_equal_eager_runs(
    executor: GraphExecutor, device: torch.device, broken: bool
) -> None:
    weight = torch.randn(64, 64, device=device)

    def double(x: Tensor, *, out: Tensor) -> None:
        if broken:
            float(x.sum())  # waits for the device, which no graph could hold
        torch.mul(x, 2, out=out)

    middle: Any = executor.eager_break(double) if broken else double

    def step(weights: Tensor, plan: StepPlan, kv: Tensor) -> StepOutput:
        x = plan.token_ids.float().unsqueeze(1) @ torch.ones(1, 64, device=device) @ weights
        middle(x, out=x)
        kv.index_copy_(0, plan.slots["latent"], x)
        return StepOutput(x.relu(), (x,), x.isnan().any())

    kv = torch.zeros(256, 64, device=device)
    calls = {rows: executor.compile(step, plan(rows, 0, device).shape) for rows in (1, 2, 4)}
    with torch.inference_mode():
        for first in range(0, 40, 4):
            for rows, call in calls.items():
                given = plan(rows, first, device)
                found = call(weight, given, kv)
                logits, written = found.logits.clone(), kv.clone()
                want = step(weight, given, kv)
                assert torch.equal(logits, want.logits)
                assert torch.equal(written, kv)
                assert not bool(found.fault)
    assert len(executor.captures) == 3
    assert {capture.segments for capture in executor.captures} == {2 if broken else 1}


def test_an_alias_is_the_same_memory(executor: GraphExecutor, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64):
        one = torch.ones(3, 5, device=device).to(dtype)
        other = alias(one)
        assert (other.dtype, other.shape, other.data_ptr()) == (dtype, one.shape, one.data_ptr())
        one.zero_()
        assert not other.any()
    with pytest.raises(TypeError, match="graphs keep results of"):
        alias(torch.ones(1, dtype=torch.float64, device=device))
