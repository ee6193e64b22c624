"""Speculation as text: stop strings within an accepted run, streams, and what is told of drafts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.async_llm import AsyncLLM
from ml4core.serving.llm import LLM

pytestmark = pytest.mark.usefixtures("probed_once")

FLAGS: dict[str, Any] = {"max_model_len": 128, "block_size": 16, "max_num_seqs": 4}
DRAFTS = {"method": "dspark", "num_speculative_tokens": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "the cat sat on", "1 2 3 4", "na na na na"]


@pytest.fixture(scope="module")
def model(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the whole vocabulary of its tokenizer."""
    return make_model(tmp_path_factory.mktemp("text"), vocab=8192)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Any]:
    with LLM(str(model), **FLAGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafted(model: Path, plain: Any, script: Any) -> Iterator[Any]:
    """Drafts of this one are the recorded greedy answers."""
    with LLM(str(model), speculative_config=DRAFTS, **FLAGS) as llm:
        answers = plain.generate(PROMPTS, GREEDY, use_tqdm=False)
        script(
            llm.engine, {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in answers}
        )
        yield llm


def test_a_stop_that_ends_within_an_accepted_run_cuts_ids_and_logprobs_too(
    plain: Any, drafted: Any
) -> None:
    """B062: stops of one to six tokens, at any place of a window."""
    whole = plain.generate(PROMPTS, GREEDY, use_tqdm=False)
    checked = 0
    for request in whole:
        (answer,) = request.outputs
        for first, length in zip(range(1, 9), (1, 2, 6, 1, 6, 2, 1, 6), strict=True):
            piece = plain.get_tokenizer().decode(answer.token_ids[first : first + length])
            stop = piece.strip("\ufffd ")
            if not stop or stop not in answer.text:
                continue
            params = replace(GREEDY, stop=(stop,), logprobs=2)
            want = plain.generate(request.prompt, params, use_tqdm=False)[0].outputs[0]
            (got,) = drafted.generate(request.prompt, params, use_tqdm=False)
            (one,) = got.outputs
            assert (one.text, one.token_ids) == (want.text, want.token_ids)
            assert (one.finish_reason, one.stop_reason) == ("stop", stop)
            assert len(one.logprobs) == len(one.token_ids)
            assert one.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)
            pairs = zip(one.token_ids, one.logprobs, strict=True)
            assert all(token in entry for token, entry in pairs)
            assert stop not in one.text
            checked += 1
    assert checked > 10
    assert {pool.used_pages for pool in drafted.engine.runner.pools.values()} == {0}


def test_answers_tell_what_became_of_their_drafts(plain: Any, drafted: Any) -> None:
    params = replace(GREEDY, max_tokens=17)
    for request in drafted.generate(PROMPTS, params, use_tqdm=False):
        (one,) = request.outputs
        assert one.drafts.acceptance_length == 4
        assert one.drafts.accepted == [4, 4, 4]
        assert (one.drafts.drafts, one.drafts.draft_tokens) == (4, 12)
    assert plain.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].drafts is None


def test_a_stream_gives_the_same_in_larger_pieces(model: Path, plain: Any, script: Any) -> None:
    want = plain.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0]

    async def main() -> None:
        async with AsyncLLM(str(model), speculative_config=DRAFTS, **FLAGS) as llm:
            ids = tuple(llm.get_tokenizer().encode(PROMPTS[0], "prompt"))
            script(llm.engine, {ids: want.token_ids})
            last = None
            async for output in llm.generate(PROMPTS[0], GREEDY, "r"):
                (one,) = output.outputs
                assert want.text.startswith(one.text)
                assert len(one.token_ids) <= 24
                last = one
            assert last is not None
            assert (last.text, last.token_ids) == (want.text, want.token_ids)
            assert last.drafts.acceptance_rate == 1

    asyncio.run(main())


def test_the_command_shows_acceptance(model: Path, capsys: Any) -> None:
    from ml4core.cli import main

    words = ["generate", str(model), "--max-model-len", "128", "--temperature", "0", "--raw"]
    words += ["--speculative-config", json.dumps(DRAFTS), "--max-tokens", "9", "--ignore-eos"]
    words += [word for prompt in PROMPTS[:2] for word in ("--prompt", prompt)]

    def run(*more: str) -> tuple[str, str]:
        assert main([*words, *more]) == 0
        return capsys.readouterr()

    out, err = run("--json")
    for record in json.loads(out)["completions"]:
        assert record["drafts"]["acceptance_length"] >= 1
        assert record["drafts"]["draft_tokens"] >= record["drafts"]["judged"] > 0
    assert "output tokens/s; drafts: 1." in err
    assert "tokens a step (accepted by place: 0." in err
    _, err = run("--report")
    assert "num_speculative_tokens 3" in err or "num_speculative_tokens: 3" in err
    assert "draft_block" in err
