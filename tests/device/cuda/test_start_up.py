"""The start of the small model on a GPU: memory against its plan, and graphs before requests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.accelerator

DRAFTS = {"method": "dspark", "num_speculative_tokens": 3}
SHARE = 0.3
"""Of the device, so that other tests of this process may hold theirs."""
OFF = 0.01

Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    opened: list[Engine] = []

    def start(**flags: Any) -> Engine:
        flags = {"max_model_len": 1024, "max_num_seqs": 8, "gpu_memory_utilization": SHARE} | flags
        opened.append(open_engine(EngineArgs("ml4-tiny", backend="cuda", **flags), fill=True))
        return opened[-1]

    yield start
    for engine in opened:
        engine.close()
    opened.clear()
    gc.collect()


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_memory_comes_out_as_planned(start: Start, drafts: bool) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    engine = start(**({"speculative_config": DRAFTS} if drafts else {}))
    memory, timings = engine.report()["memory"], engine.report()["start_up"]
    assert memory["agrees"], memory
    pools = memory["pools"]
    assert abs(pools["taken"] - pools["planned"]) <= OFF * pools["planned"]
    assert memory["in_all"]["off_percent"] <= 100 * OFF
    used = before - torch.cuda.mem_get_info()[0] + memory["activations"]["taken"]
    assert abs(used - memory["share"]) <= OFF * memory["total"], (used, memory)
    assert timings["captures"] > 0
    assert timings["capture_s"] > 0
    assert memory["graphs"]["taken"] > 0
    executor: Any = engine.runner.session.executor
    captured = len(executor.captures)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.generate([[5] * 20] * 8, params)
    engine.generate([[7] * 300], params)
    assert len(executor.captures) == captured, "what requests need was captured before"


def test_without_graphs_nothing_is_captured(start: Start) -> None:
    engine = start(enforce_eager=True)
    assert engine.report()["start_up"]["captures"] == 0
    assert engine.report()["memory"]["agrees"]


def test_sizes_that_do_not_fit_are_named(start: Start) -> None:
    with pytest.raises(RequestError, match=r"--kv-cache-memory-bytes: .*at most \d+"):
        start(kv_cache_memory_bytes=10**13)
    with pytest.raises(RequestError, match=r"--max-model-len: 1024 .*--gpu-memory-utilization"):
        start(gpu_memory_utilization=1e-4)
