"""The start of an engine with a drafter, on a device with memory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ml4core.api import DRAFT_GROUP
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.registry import select
from support.metered import Meter, Metered, metered

pytestmark = pytest.mark.usefixtures("probed_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5] * 20, [7, 8, 9], list(range(100, 140)), [3]]


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_windows_and_blocks_are_tried_and_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain, meter, sessions = select("cpu"), Meter(), list[Metered]()
    sizes: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    args = EngineArgs(str(folder), backend="cpu", block_size=16, **sizes)
    config = {"method": "dspark", "num_speculative_tokens": 3, "draft_sample_method": method}
    want = open_engine(args, choice=plain, sequences=4).generate(PROMPTS, GREEDY)
    chip = metered(plain, meter, monkeypatch, sessions=sessions)
    drafted = EngineArgs(
        str(folder), backend="cpu", block_size=16, speculative_config=config, **sizes
    )
    engine = open_engine(drafted, choice=chip, fill=True)
    executor = sessions[0].executor
    rows = [one.shape.verify.rows for one in executor.captures]
    assert rows == [16, 16, 8, 8, 4, 4]
    told = engine.report()["memory"]
    assert {step["name"] for step in told["steps"]} == {"prefill", "mixed", "verify"}
    assert told["agrees"]
    assert engine.kv_plan.blocks.keys() == {"latent", "index", DRAFT_GROUP}
    blocks = [s for s in executor.ran if [group for group, _ in s.pages] == [DRAFT_GROUP]]
    assert {shape.verify.requests for shape in blocks} >= {1, 2, 4}
    executor.ran.clear()
    assert [one.token_ids for one in engine.generate(PROMPTS, GREEDY)] == [
        one.token_ids for one in want
    ]
    assert len(executor.captures) == 6
    assert {s.pages[0][1] for s in executor.ran} <= {2, 7}, "tables of all groups have one width"
    engine.close()
