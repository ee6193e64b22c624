"""A micro model with a drafter of random weights, and engines that draft by it or by a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import DraftOutput
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.speculation import Drafting
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.dspark import draft_spec
from ml4core.models.dspark_weights import expected_draft_tensors
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS
from ml4core.registry import select

SIZES: dict[str, Any] = {"layers": 4, "topk": 16}
MTP: dict[str, Any] = {
    "target_layers": [0, 2, 3],
    "n_layers": 2,
    "depth": 3,
    "sliding_window": 24,
    "mask_rows": 2,
    "markov_rank": 16,
    "head_input": "normed",
}


def make_model(folder: Path, vocab: int = 320, scale: float = 1.0, **mtp: Any) -> Path:
    """A checkpoint of target and drafter. ``scale``: of the drafter's output."""
    sizes = SIZES | {"vocab": vocab}
    target = make_seeded(folder / "target", "micro", **sizes)
    params = replace(PRESETS["micro"], **sizes).params() | {"mtp": MTP | mtp}
    draft = draft_spec(build_model_spec(params))
    generator = torch.Generator().manual_seed(5)
    checkpoint = Checkpoint.open(target)
    with CheckpointWriter(folder / "model") as writer:
        writer.add_json("params.json", json.loads(json.dumps(params)))
        for name in checkpoint.tensors:
            writer.add(name, checkpoint.read(name))
        for name, entry in expected_draft_tensors(draft, False).items():
            shape = entry.shapes[0]
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            values = 1 + 0.1 * values if entry.kind == "vector" else values
            writer.add(name, (values * (scale if "w2" in name else 1.0)).to(torch.bfloat16))
        writer.add_file("tekken.json", (target / "tekken.json").read_bytes())
    return folder / "model"


Start = Callable[..., Engine]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return make_model(tmp_path_factory.mktemp("speculation"))


def opener(folder: Path) -> Iterator[Start]:
    choice, opened = select("cpu"), []

    def start(
        drafts: int | dict[str, Any] = 0, sequences: int = 8, tokens_each: int = 160, **flags: Any
    ) -> Engine:
        config = {"num_speculative_tokens": drafts} if isinstance(drafts, int) else drafts
        if drafts:
            flags["speculative_config"] = {"method": "dspark"} | config
        # Without a limit of time steps are the model's own, which tests change.
        settings = {"block_size": 16, "step_timeout_s": 0} | flags
        args = EngineArgs(str(folder), backend="cpu", **settings)
        engine = open_engine(args, choice=choice, sequences=sequences, tokens_each=tokens_each)
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()


class Scripted:
    """Proposes recorded continuations of prompts, of which one draft in ``every`` is wrong; with
    ``every`` 0 it stands for a drafter that is its target.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab: int, every: int = 0
    ) -> None:
        self.answers = dict(answers)
        self.vocab = vocab
        self.every = every
        self.count = 0

    def propose(self, drafting: Drafting) -> DraftOutput:
        ids = torch.zeros(len(drafting.anchors), 3, dtype=torch.int64)
        for request, row in drafting.rows.items():
            answer = self.answers[tuple(row.prompt_ids)]
            made = int(drafting.sampling.positions[request]) + 1 - len(row.prompt_ids)
            for i, token in enumerate(answer[made : made + 3]):
                self.count += 1
                wrong = self.every and self.count % self.every == 0
                ids[request, i] = (token + 1) % self.vocab if wrong else token
        logits = torch.nn.functional.one_hot(ids, self.vocab) * 20.0
        return DraftOutput(ids, logits)


def script(
    engine: Engine, answers: Mapping[tuple[int, ...], Sequence[int]], every: int = 0
) -> None:
    """From now on the engine's drafts are recorded ones."""
    steps: Any = engine.core._runner
    speculation = getattr(steps, "_steps", steps)._speculation  # those of the model
    vocab = engine.deployment.model.vocab_size
    speculation._proposer = Scripted(answers, vocab, every)


def run(engine: Engine, *requests: tuple[str, list[int], SamplingParams]) -> dict[Any, Any]:
    """Of each answer its last output, with all tokens and logprobs."""
    for name, prompt, params in requests:
        engine.core.add_request(name, prompt, params)
    done: dict[Any, Any] = {}
    while engine.core.has_work:
        for output in engine.core.step():
            before = done.get((output.request_id, output.index))
            if before is not None:
                output.token_ids[:0] = before.token_ids
                if output.logprobs is not None:
                    output.logprobs[:0] = before.logprobs
            done[output.request_id, output.index] = output
        if engine.core.cause is not None:
            raise engine.core.cause
    assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}
    return done


@pytest.fixture(name="script", scope="session")
def script_fixture() -> Callable[..., None]:
    return script


@pytest.fixture(name="run")
def run_fixture() -> Callable[..., dict[Any, Any]]:
    return run


@pytest.fixture(name="opener")
def opener_fixture() -> Callable[..., Iterator[Start]]:
    return opener


@pytest.fixture(scope="module")
def start(folder: Path, probed_once: None) -> Iterator[Start]:
    yield from opener(folder)


@pytest.fixture(name="make_model", scope="session")
def make_model_fixture() -> Callable[..., Path]:
    return make_model
