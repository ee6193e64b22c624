"""Runs of prompts: what is refused before they start, and what they leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import FaultError
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.grammars import Masks
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.structured_outputs import StructuredOutputsParams
from ml4core.models.seeded import make_seeded

pytestmark = pytest.mark.usefixtures("probed_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPTS = [[7, 8, 9], [10], list(range(20, 60))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("generate") / "m", "micro", layers=4, vocab=320)


@pytest.fixture
def engine(folder: Path) -> Engine:
    """Pools of 4 pages of 16 tokens."""
    args = EngineArgs(str(folder), backend="cpu", block_size=16, max_num_seqs=2)
    return open_engine(args, sequences=2, tokens_each=32)


def free(engine: Engine) -> set[int]:
    return {pool.free_pages for pool in engine.runner.pools.values()}


def test_a_prompt_that_never_fits_is_refused_before_any_other_is_run(engine: Engine) -> None:
    told: list[int] = []
    with pytest.raises(RequestError) as refused:
        engine.generate([*PROMPTS, [1] * 90], GREEDY, lambda index, token: told.append(index))
    assert refused.value.field == "prompt 3 with its answer"
    assert refused.value.value == "94 tokens"
    assert "at most 65 in this pool" in refused.value.remedy
    assert told == []
    # What is said to fit does.
    longest = replace(GREEDY, max_tokens=62)
    assert len(engine.generate([PROMPTS[0]], longest)[0].token_ids) == 62


def test_pages_come_back_whatever_ends_a_call(engine: Engine) -> None:
    def told(index: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY, told)
    assert free(engine) == {4}
    before = engine.generate(PROMPTS, GREEDY)
    assert free(engine) == {4}
    assert engine.generate(PROMPTS, GREEDY) == before


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_seeds_at_either_end_serve_several_prompts(engine: Engine, seed: int) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=seed, ignore_eos=True)
    first = engine.generate([PROMPTS[0]] * 3, params)
    assert engine.generate([PROMPTS[0]] * 3, params) == first
    assert first[0] != first[1] != first[2]


def test_a_first_token_that_stops_is_the_whole_answer(engine: Engine) -> None:
    stops = replace(GREEDY, stop_token_ids=tuple(range(320)))
    done = engine.generate(PROMPTS, stops)
    assert [(len(c.token_ids), c.finish_reason) for c in done] == [(1, "stop")] * 3


class Losing:
    """A compiler, and a matcher of its, that can't follow what it allowed."""

    words, eos_id, error = 10, 2, ""

    def check(self, form: StructuredOutputsParams) -> None: ...

    def matcher(self, form: StructuredOutputsParams) -> Losing:
        return Losing()

    def accept(self, token_ids: Sequence[int]) -> None:
        self.error = "lost"

    def fill(self, work: Sequence[tuple[Any, int, Sequence[int]]], masks: Masks) -> None: ...


def test_an_answer_whose_grammar_fails_ends_alone(folder: Path) -> None:
    args = EngineArgs(str(folder), backend="cpu", block_size=16, max_num_seqs=2)
    engine = open_engine(args, sequences=2, tokens_each=32, grammars=Losing())
    params = SamplingParams(
        temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="a*")
    )
    done = engine.generate(PROMPTS[:2], params)
    assert [(len(c.token_ids), c.finish_reason) for c in done] == [(2, "error")] * 2
    assert engine.generate(PROMPTS[:1], GREEDY)[0].finish_reason == "length"


def test_a_fault_is_told_to_plugins_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(
        "ml4core.registry.notify_fault", lambda fault, manager: told.append(fault.code)
    )
    weights = engine.runner.weights
    assert weights is not None
    weights.layers[0]["index_wk"].data[0, 0] = float("nan")
    for _ in range(3):
        with pytest.raises(FaultError):
            engine.generate(PROMPTS, GREEDY)
    assert told == ["nan"]
    assert free(engine) == {4}


def test_a_step_holds_every_sequence_by_default(folder: Path) -> None:
    """Each sequence of a step needs a row."""
    args = EngineArgs(str(folder), backend="cpu", max_num_seqs=2000)
    engine = open_engine(args, sequences=1, tokens_each=16)
    assert engine.deployment.max_num_batched_tokens == 2000
