"""Images beside drafts and preemption, with random weights: neither changes what follows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.llm import Engine, open_engine
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.dspark import draft_spec
from ml4core.models.dspark_weights import expected_draft_tensors
from ml4core.models.layer_table import build_model_spec
from ml4core.models.pixtral import vision_spec
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS
from ml4core.registry import select

from .support import BLOCK, random_tensors
from .test_prompts import CELLS, PARAMS, SIZES, placed, tokens

pytestmark = pytest.mark.usefixtures("probed_once")

MTP: dict[str, Any] = {
    "target_layers": [0, 2, 3],
    "n_layers": 2,
    "depth": 3,
    "sliding_window": 24,
    "mask_rows": 2,
    "markov_rank": 16,
    "head_input": "normed",
}
GREEDY = replace(PARAMS, max_tokens=24, logprobs=None)
SEEDS = (1, 2, 3, 4)
"""Of the images of as many requests, whose tokens are alike."""

Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Decoder, drafter and encoder."""
    folder = tmp_path_factory.mktemp("images")
    target = make_seeded(folder / "target", "micro", **SIZES)
    params = replace(PRESETS["micro"], **SIZES).params()
    params |= {"mtp": MTP, "vision_encoder": dict(BLOCK)}
    draft, vision = draft_spec(build_model_spec(params)), vision_spec(params, int(params["dim"]))
    assert vision is not None
    generator = torch.Generator().manual_seed(5)
    checkpoint = Checkpoint.open(target)
    with CheckpointWriter(folder / "model") as writer:
        writer.add_json("params.json", json.loads(json.dumps(params)))
        for name in checkpoint.tensors:
            writer.add(name, checkpoint.read(name))
        for name, entry in expected_draft_tensors(draft, False).items():
            values = torch.randn(entry.shapes[0], generator=generator) / entry.shapes[0][-1] ** 0.5
            values = 1 + 0.1 * values if entry.kind == "vector" else values
            writer.add(name, values.to(torch.bfloat16))
        for name, tensor in random_tensors(vision).items():
            writer.add(name, tensor)
        writer.add_file("tekken.json", (target / "tekken.json").read_bytes())
    return folder / "model"


@pytest.fixture(scope="module")
def start(model: Path) -> Iterator[Start]:
    choice, opened = select("cpu"), []

    def made(drafts: bool = False, **flags: Any) -> Engine:
        settings: dict[str, Any] = {"block_size": 16, "step_timeout_s": 0.0, "max_num_seqs": 4}
        settings |= {"limit_mm_per_prompt": {"image": 2}}
        if drafts:
            settings["speculative_config"] = {"method": "dspark", "num_speculative_tokens": 3}
        args = EngineArgs(str(model), backend="cpu", **settings | flags)
        opened.append(open_engine(args, choice=choice, sequences=4, tokens_each=96))
        return opened[-1]

    yield made
    for engine in opened:
        engine.close()


def answers(engine: Engine, seeds: tuple[int, ...] = SEEDS) -> list[list[int]]:
    """To prompts of equal tokens with other images, all at once."""
    core = engine.core
    for seed in seeds:
        core.add_request(str(seed), tokens(CELLS), GREEDY, images=placed(engine, CELLS, seed))
    made: dict[str, list[int]] = {str(seed): [] for seed in seeds}
    while core.has_work:
        for output in core.step():
            made[output.request_id] += output.token_ids
        if core.cause is not None:
            raise core.cause
    assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}
    return [made[str(seed)] for seed in seeds]


@pytest.fixture(scope="module")
def alone(start: Start) -> list[list[int]]:
    engine = start(enable_prefix_caching=False)
    found = [answers(engine, (seed,))[0] for seed in SEEDS]
    assert len({tuple(one) for one in found}) > 1, "images make a difference"
    return found


@pytest.mark.parametrize(("overlap", "caching"), [(False, True), (True, False)])
def test_drafts_behind_images_change_nothing(
    start: Start, alone: list[list[int]], overlap: bool, caching: bool
) -> None:
    engine = start(drafts=True, max_num_batched_tokens=16, enable_prefix_caching=caching)
    engine.core.overlap = overlap
    assert answers(engine) == alone
    assert answers(engine) == alone, "of images that are kept"
    counts = engine.core.stats().drafts
    assert counts is not None
    assert counts.draft_tokens > 0


@pytest.mark.parametrize(("drafts", "overlap"), [(False, False), (True, True)])
def test_preempted_requests_have_their_images_again(
    start: Start, alone: list[list[int]], drafts: bool, overlap: bool
) -> None:
    """There is room for one of them, and for the beginning of others."""
    with pytest.raises(RequestError) as error:
        start(drafts=drafts, kv_cache_memory_bytes=1)
    least = int(error.value.remedy.removeprefix("at least ").split()[0])
    engine = start(drafts=drafts, enable_prefix_caching=False, kv_cache_memory_bytes=least)
    engine.core.overlap = overlap
    assert answers(engine) == alone
    assert engine.core.stats().preemptions > 0


@pytest.mark.multiprocess
def test_ranks_share_a_model_with_images_and_drafts(start: Start, alone: list[list[int]]) -> None:
    engine = start(drafts=True, tensor_parallel_size=2)
    assert answers(engine) == alone
    engine.close()
