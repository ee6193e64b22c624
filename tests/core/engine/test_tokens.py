"""A small model on the cpu: its tokens are the same however they are scheduled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import Schedule
from ml4core.models.seeded import make_seeded
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TOPK = 16
LENGTHS = (1, 2, TOPK - 1, TOPK, TOPK + 1, 33, 48, 61)

Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "m"
    return make_seeded(folder, "micro", layers=4, vocab=320, topk=TOPK)


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Start]:
    choice, opened = select("cpu"), []

    def start(sequences: int = 8, tokens_each: int = 80, **flags: Any) -> Engine:
        args = EngineArgs(str(folder), backend="cpu", **({"block_size": 16} | flags))
        engine = open_engine(args, choice=choice, sequences=sequences, tokens_each=tokens_each)
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()


def run(engine: Engine, *requests: tuple[str, list[int], dict[str, Any]]) -> dict[str, Any]:
    """Last output of each request, with all its tokens and logprobs."""
    for name, prompt, options in requests:
        engine.core.add_request(name, prompt, options.pop("params", GREEDY), **options)
    done: dict[str, Any] = {}
    while engine.core.has_work:
        for output in engine.core.step():
            before = done.get(output.request_id)
            if before is not None:
                output.token_ids[:0] = before.token_ids
                output.prompt_logprobs = before.prompt_logprobs
                if output.logprobs is not None:
                    output.logprobs[:0] = before.logprobs
            done[output.request_id] = output
    return done


@pytest.fixture(scope="module")
def alone(start: Start) -> dict[tuple[int, ...], list[int]]:
    """Greedy answers of prompts run alone and whole, with a lead of the likeliest token that no
    other order of sums takes away.
    """
    engine = start(max_num_seqs=1)
    found: dict[tuple[int, ...], list[int]] = {}
    for length in LENGTHS:
        for shift in range(40):
            prompt = [(7 * i + 31 * shift + length) % 320 for i in range(length)]
            params = replace(GREEDY, logprobs=2)
            output = run(engine, ("r", prompt, {"params": params}))["r"]
            leads = []
            for entries in output.logprobs:
                best, second = sorted((e.logprob for e in entries.values()), reverse=True)[:2]
                leads.append(best - second)
            if min(leads) > 1e-3:
                found[tuple(prompt)] = output.token_ids
                break
    assert len(found) == len(LENGTHS)
    return found


def test_batched_equals_alone(start: Start, alone: dict[tuple[int, ...], list[int]]) -> None:
    for flags in ({}, {"max_num_seqs": 3}, {"enable_prefix_caching": True}):
        done = start(**flags).generate([list(prompt) for prompt in alone], GREEDY)
        assert [c.token_ids for c in done] == list(alone.values()), flags


def test_overlapped_equals_in_turn(start: Start, alone: dict[tuple[int, ...], list[int]]) -> None:
    """Each step is given tokens of the one before that were not known when it was planned."""
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=8, frequency_penalty=1.5, ignore_eos=True
    )
    prompts = [list(prompt) for prompt in alone]
    engine = start(max_num_seqs=3)
    in_turn = engine.generate(prompts, params)
    engine.core.overlap = True
    assert engine.generate(prompts, params) == in_turn
    done = engine.generate(prompts, GREEDY)
    assert [c.token_ids for c in done] == list(alone.values())
    assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}


@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_chunked_equals_whole(
    start: Start, alone: dict[tuple[int, ...], list[int]], rows: int
) -> None:
    """B007."""
    engine = start(max_num_batched_tokens=rows)
    done = engine.generate([list(prompt) for prompt in alone], GREEDY)
    assert [c.token_ids for c in done] == list(alone.values())


@pytest.mark.parametrize("kv", ["auto", "fp8_ds_mla"])
def test_a_prefix_hit_equals_a_miss(start: Start, kv: str) -> None:
    """B025, B029, B056: also a second turn, also beside a request that decodes."""
    flags: dict[str, Any] = {"kv_cache_dtype": kv}
    plain, caching = start(**flags), start(enable_prefix_caching=True, **flags)
    first = [(11 * i + 3) % 320 for i in range(40)]
    answer = run(plain, ("a", first, {}))["a"].token_ids
    second = first + answer + [5, 6, 7]
    want = run(plain, ("a", second, {}))["a"].token_ids
    cached = []
    for turn, salt in enumerate(["s", "s", "t"]):
        got = run(caching, (f"{turn}", first, {"cache_salt": salt}))[f"{turn}"]
        assert got.token_ids == answer
        cached.append(got.cached_tokens)
    assert cached == [0, 32, 0]
    done = run(
        caching,
        ("other", [9] * 50, {"params": replace(GREEDY, max_tokens=20)}),
        ("second", second, {"cache_salt": "s"}),
    )
    assert done["second"].token_ids == want
    assert done["second"].cached_tokens == 32
    assert caching.core.stats().cache_hits == {"latent": 64, "index": 64}


def test_preempted_equals_undisturbed(
    start: Start, alone: dict[tuple[int, ...], list[int]]
) -> None:
    """B068."""
    prompts = [prompt for prompt in alone if len(prompt) < 20]
    params = replace(GREEDY, max_tokens=24)
    one = start(max_num_seqs=1)
    page = one.kv_plan.bytes_per_token * 16
    for caching in (False, True):
        engine = start(kv_cache_memory_bytes=8 * page, enable_prefix_caching=caching)
        done = engine.generate([list(prompt) for prompt in prompts], params)
        assert engine.core.stats().preemptions > 0
        for prompt, completion in zip(prompts, done, strict=True):
            assert len(completion.token_ids) == 24
            assert completion.token_ids[:8] == alone[prompt]
        want = one.generate([list(prompt) for prompt in prompts], params)
        same = [a == b for a, b in zip(done, want, strict=True)]
        assert same.count(False) <= 1, "beyond 8 tokens a lead may be too small to survive"


def test_cancelled_neighbours_change_nothing(
    start: Start, alone: dict[tuple[int, ...], list[int]]
) -> None:
    engine = start()
    core = engine.core
    prompts = list(alone)
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), list(prompt), GREEDY)
    made: dict[str, list[int]] = {}
    steps = 0
    while core.has_work:
        for output in core.step():
            made.setdefault(output.request_id, []).extend(output.token_ids)
        steps += 1
        if steps in (1, 3):
            core.abort(str(steps))
    for i, prompt in enumerate(prompts):
        want = alone[prompt]
        assert made[str(i)] == (want[:steps] if i not in (1, 3) else want[: len(made[str(i)])])
    assert len(made["1"]) < 8 > len(made["3"])
    assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}


def test_answers_of_one_prompt(start: Start) -> None:
    """B104."""
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
    prompt = list(range(20))
    found = []
    for flags in ({}, {"enable_prefix_caching": True}, {"max_num_batched_tokens": 7}):
        engine = start(**flags)
        done = engine.generate([prompt], params)
        assert len({tuple(c.token_ids) for c in done}) == 3
        single = engine.generate([prompt], replace(params, n=1))
        assert single[0] == done[0]
        found.append(done)
    assert found[0] == found[1] == found[2]
    with pytest.raises(RequestError, match="n: 17"):
        start().generate([prompt], replace(params, n=17))


def test_reports_on_a_prompt_are_the_same_in_chunks_and_after_a_hit(start: Start) -> None:
    """B007: and a request that wants them is not answered from the cache."""
    prompt = [(13 * i + 5) % 320 for i in range(37)]
    params = replace(GREEDY, prompt_logprobs=1, logprobs=0, max_tokens=2)
    reports = []
    for flags in ({}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": True}):
        engine = start(**flags)
        run(engine, ("warm", prompt, {}))
        done = run(engine, ("a", prompt, {"params": params}), ("b", [3] * 9, {}))
        assert done["a"].cached_tokens == 0
        assert done["b"].prompt_logprobs is None
        assert len(done["a"].logprobs) == 2
        reports.append(done["a"].prompt_logprobs)
    for report in reports:
        assert len(report) == 37
        assert report[0] is None
        for entries, first, token in zip(report[1:], reports[0][1:], prompt[1:], strict=True):
            assert next(iter(entries)) == token
            assert entries[token].logprob == pytest.approx(first[token].logprob, abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_report_survives_a_preemption_within_the_prompt(start: Start, overlap: bool) -> None:
    prompt = [(13 * i + 5) % 320 for i in range(37)]
    params = replace(GREEDY, prompt_logprobs=0, max_tokens=2)
    engine = start(max_num_batched_tokens=16)
    core = engine.core
    want = run(engine, ("a", prompt, {"params": params}))["a"]
    core.overlap = overlap
    core.add_request("a", prompt, params)
    assert core.step() + core.step() == []
    (request,) = core.scheduler.running
    known = len(request.prompt_logprobs)
    assert known == (16 if overlap else 32)
    core.scheduler._preempt(Schedule(), request)
    core._batch.unbind(request)
    (first, *_) = [output for _ in range(8) if core.has_work for output in core.step()]
    assert first.token_ids == want.token_ids[:1]
    assert len(first.prompt_logprobs or ()) == 37
    for entries, other in zip(first.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
        assert entries.keys() == other.keys()


def test_the_pools_of_a_plan_can_be_filled(start: Start) -> None:
    engine = start(sequences=4, tokens_each=64)
    planned = engine.kv_plan.tokens
    peak = 0.0
    for i in range(4):
        engine.core.add_request(str(i), [i] * 32, replace(GREEDY, max_tokens=33))
    while engine.core.has_work:
        engine.core.step()
        peak = max(peak, *engine.core.stats().usage.values())
    assert planned == 256
    assert peak >= 0.99
    assert engine.core.stats().preemptions == 0
