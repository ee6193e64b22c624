"""Two GPUs that share a model out make the tokens that one makes, in graphs too.

In fp32, where only the order of sums differs, so that greedy tokens are the same.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.seeded import make_seeded

pytestmark = [pytest.mark.accelerator, pytest.mark.multiprocess]

RANKS = 2
FLAGS: dict[str, Any] = {
    "backend": "cuda",
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.3,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAFTS = {"method": "dspark", "num_speculative_tokens": 3}


@pytest.fixture(autouse=True)
def devices() -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} NVIDIA GPUs")


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(64, 8192, (n,), generator=draw).tolist() for n in (40, 3, 300, 65)]


def tokens(model: Path | str, ranks: int, **flags: Any) -> list[list[int]]:
    """Alone and together: steps of several sizes."""
    args = EngineArgs(str(model), tensor_parallel_size=ranks, **FLAGS, **flags)
    engine = open_engine(args, fill=True)
    try:
        found = [one.token_ids for one in engine.generate(prompts()[:1], GREEDY)]
        found += [one.token_ids for one in engine.generate(prompts(), GREEDY)]
        if ranks > 1:
            assert engine.report()["parallel"]["tensor_parallel_size"] == ranks
        if not flags.get("enforce_eager"):
            assert engine.report()["start_up"]["captures"] > 0
    finally:
        engine.close()
        del engine
        gc.collect()
    return found


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_heads_and_widths_in_halves(tmp_path: Path, eager: bool) -> None:
    folder = make_seeded(tmp_path / "m", format="bf16")
    alone = tokens(folder, 1, enforce_eager=eager)
    assert tokens(folder, RANKS, enforce_eager=eager) == alone


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_whole_experts_and_drafts(eager: bool) -> None:
    """The shipped model, in FP8."""
    alone = tokens("ml4-tiny", 1, enforce_eager=eager)
    flags = {"enable_expert_parallel": True, "speculative_config": DRAFTS}
    assert tokens("ml4-tiny", RANKS, enforce_eager=eager, **flags) == alone
