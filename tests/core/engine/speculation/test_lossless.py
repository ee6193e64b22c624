"""Speculation on a model with random weights: drafts change how fast tokens come, never which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ml4core.api import DRAFT_GROUP, StepBuckets
from ml4core.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LENGTHS = (1, 2, 15, 16, 17, 40, 61)
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few at a time": {"max_num_seqs": 3},
    "chunked": {"max_num_batched_tokens": 11},
    "rows for few windows": {"max_num_seqs": 4, "max_num_batched_tokens": 5},
    "prefix cache": {"enable_prefix_caching": True},
}

Start = Callable[..., Any]
Run = Callable[..., dict[Any, Any]]
Answers = Mapping[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def answers(start: Start) -> Answers:
    """Greedy answers without drafts, whose likeliest token leads by more than rounding takes."""
    engine, found = start(max_num_seqs=1), {}
    for length in LENGTHS:
        for shift in range(60):
            prompt = [(7 * i + 31 * shift + length) % 320 for i in range(length)]
            engine.core.add_request("r", prompt, replace(GREEDY, logprobs=2))
            tokens, leads = [], []
            while engine.core.has_work:
                for output in engine.core.step():
                    tokens += output.token_ids
                    for entry in output.logprobs:
                        best, second = sorted(e.logprob for e in entry.values())[-1:-3:-1]
                        leads.append(best - second)
            if min(leads) > 1e-3:
                found[tuple(prompt)] = tokens
                break
    assert len(found) == len(LENGTHS)
    return found


def tokens_of(engine: Any, answers: Answers, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [one.token_ids for one in engine.generate([list(p) for p in answers], params)]


IN_BOTH_WAYS = {"plain", "prefix cache"}
"""Flags that are tried in turn and overlapped; of the others one way is for `make test-full`."""
IN_TURN = {"few at a time"}


def fast(flags: str, overlap: bool) -> bool:
    return flags in IN_BOTH_WAYS or overlap != (flags in IN_TURN)


@pytest.mark.parametrize(
    ("flags", "overlap"),
    [
        pytest.param(flags, overlap, marks=() if fast(flags, overlap) else pytest.mark.slow)
        for flags in FLAGS
        for overlap in (False, True)
    ],
)
def test_greedy_tokens_are_those_without_drafts(
    start: Start, script: Any, answers: Answers, flags: str, overlap: bool
) -> None:
    """B066: by the checkpoint's drafter, by a script that is often wrong, and by the target's own
    continuation, which is always accepted.
    """
    want = list(answers.values())
    engine = start(2 if flags == "plain" else 3, **FLAGS[flags])
    engine.core.overlap = overlap
    assert tokens_of(engine, answers) == want
    before = engine.core.stats().drafts
    for every in (4, 0):
        script(engine, answers, every)
        assert tokens_of(engine, answers) == want
        counts = engine.core.stats().drafts
        judged = counts.draft_tokens - before.draft_tokens
        accepted = counts.accepted_tokens - before.accepted_tokens
        assert judged > 0
        assert (accepted == judged) == (every == 0)
        before = counts


def test_a_drafter_that_is_its_target_is_accepted_at_every_place(
    start: Start, script: Any, answers: Answers
) -> None:
    """B066."""
    engine = start(3)
    script(engine, answers)
    # The first token comes with the prompt; then windows of four tokens.
    engine.generate([list(p) for p in answers], replace(GREEDY, max_tokens=17))
    counts = engine.core.stats().drafts
    assert counts.acceptance_by_position == [1.0, 1.0, 1.0]
    assert counts.acceptance_length == 4.0
    assert counts.acceptance_rate == 1.0
    assert engine.core.stats().steps <= 1 + 4 + 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_go_on_as_they_would(
    start: Start, script: Any, answers: Answers, caching: bool, overlap: bool
) -> None:
    engine = start(3, sequences=3, tokens_each=64, enable_prefix_caching=caching, max_num_seqs=6)
    engine.core.overlap = overlap
    script(engine, answers, 3)
    assert tokens_of(engine, answers) == list(answers.values())
    if not caching:
        assert engine.core.stats().preemptions > 0
    assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}


OPTIONS: list[tuple[dict[str, Any], tuple[bool, ...]]] = [
    ({"frequency_penalty": 1.5}, (False,)),
    ({"presence_penalty": 1.2}, (True,)),
    ({"repetition_penalty": 1.3}, (False,)),
    ({"frequency_penalty": 0.7, "repetition_penalty": 1.1, "logprobs": 3}, (False, True)),
    ({"logit_bias": {5: 4.0, 7: -3.0}, "logprobs": 2}, (False,)),
    ({"allowed_token_ids": tuple(range(0, 320, 3))}, (True,)),
    ({"min_tokens": 9, "stop_token_ids": tuple(range(0, 320, 2))}, (True,)),
    ({"stop_token_ids": tuple(range(0, 320, 17))}, (False, True)),
    ({"logprobs": 5}, (False,)),
]
"""With the ways, overlapped or not, that `make test` tries; `make test-full` tries both."""


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        pytest.param(
            options,
            overlap,
            id=f"{'+'.join(options)}-{overlap}",
            marks=() if overlap in fast_ways else pytest.mark.slow,
        )
        for options, fast_ways in OPTIONS
        for overlap in (False, True)
    ],
)
def test_what_depends_on_the_tokens_before_counts_real_drafts(
    start: Start, run: Run, script: Any, options: dict[str, Any], overlap: bool
) -> None:
    """B060, B064: penalties, bias, stops and logprobs are those of plain decoding, row by row."""
    params = replace(GREEDY, max_tokens=24, **options)
    prompts = {f"{i}": [(5 * i + j % 3) % 320 for j in range(3 + 4 * i)] for i in range(5)}
    requests = [(name, prompt, params) for name, prompt in prompts.items()]
    plain = run(start(), *requests)
    recorded = {tuple(prompts[name]): one.token_ids for (name, _), one in plain.items()}
    engine = start(3)
    engine.core.overlap = overlap
    for every in (0, 3):
        script(engine, recorded, every)
        drafted = run(engine, *requests)
        assert {k: one.token_ids for k, one in drafted.items()} == {
            k: one.token_ids for k, one in plain.items()
        }
        for key, one in drafted.items():
            assert one.finish_reason == plain[key].finish_reason
            assert one.output_tokens == len(one.token_ids)
            if "logprobs" not in options:
                assert one.logprobs is None
                continue
            assert len(one.logprobs) == len(one.token_ids)
            pairs = zip(one.logprobs, plain[key].logprobs, one.token_ids, strict=True)
            for entry, other, token in pairs:
                assert list(entry) == list(other)
                assert entry[token].rank == other[token].rank
                for shown in entry:
                    assert entry[shown].logprob == pytest.approx(other[shown].logprob, abs=1e-4)
    counts = engine.core.stats().drafts
    assert counts.accepted_tokens > 0


def test_draws_are_the_same_again_and_whatever_runs_beside_them(
    start: Start, answers: Answers
) -> None:
    prompts = [list(prompt) for prompt in answers]
    for method in ("greedy", "probabilistic"):
        for rule in ("standard", "block"):
            config = {"draft_sample_method": method, "rejection_sample_method": rule}
            engine = start(config, sequences=9)
            params = SamplingParams(
                temperature=1.0, seed=11, max_tokens=9, ignore_eos=True, top_k=20, top_p=0.9
            )
            first = engine.generate(prompts, params)
            for i in (0, 3, 6):  # one token, a page, and some pages
                (alone,) = engine.generate([prompts[i]], replace(params, seed=11 + i))
                assert alone == first[i]
            engine.core.overlap = True
            assert engine.generate(prompts, params) == first
            several = engine.generate([prompts[3]], replace(params, n=3, seed=14))
            assert several[0] == first[3], "prompt i draws with the seed plus i"
            assert len({tuple(one.token_ids) for one in several}) == 3


def test_cancelled_neighbours_change_nothing(start: Start, script: Any, answers: Answers) -> None:
    for overlap in (False, True):
        engine = start(3)
        engine.core.overlap = overlap
        script(engine, answers, 4)
        core, made = engine.core, {}
        for i, prompt in enumerate(answers):
            core.add_request(str(i), list(prompt), GREEDY)
        steps = 0
        while core.has_work:
            for output in core.step():
                made.setdefault(output.request_id, []).extend(output.token_ids)
            steps += 1
            if steps in (1, 3):
                core.abort(str(steps))
        for i, want in enumerate(answers.values()):
            got = made.get(str(i), [])
            assert got == (want if i not in (1, 3) else want[: len(got)])
        assert {pool.used_pages for pool in engine.runner.pools.values()} == {0}


def test_a_hit_is_as_long_as_without_drafts_and_changes_nothing(start: Start, run: Run) -> None:
    """B050."""
    first = [(11 * i + 3) % 320 for i in range(64)]
    cached = {}
    for drafts in (0, 3):
        engine = start(drafts, enable_prefix_caching=True, tokens_each=200)
        answer = run(engine, ("a", first, GREEDY))["a", 0].token_ids
        second = first + answer + [5, 6, 7]
        again = run(engine, ("a", first, GREEDY))["a", 0]
        more = run(engine, ("b", second, GREEDY))["b", 0]
        cached[drafts] = (again.cached_tokens, more.cached_tokens, answer, more.token_ids)
        assert again.token_ids == answer
    assert cached[0] == cached[3]
    assert cached[0][:2] == (48, 80)


@pytest.mark.parametrize("overlap", [False, True])
def test_padded_windows_on_static_memory_give_the_same(
    start: Start,
    script: Any,
    static_executor: Callable[[], Any],
    answers: Answers,
    overlap: bool,
) -> None:
    """Buckets pad windows with whole requests, and an executor spoils what it gave before."""
    engine = start(3, sequences=9)
    executor = static_executor()
    engine.runner.session.executor = executor
    sizes = (1, 2, 4, 16)
    engine.core._batch._buckets = StepBuckets(
        sizes, sizes, sizes, (32, 256), (4, 8, 16), (8, 64, 256)
    )
    engine.core.overlap = overlap
    for own in (True, False):
        if not own:
            script(engine, answers, 3)
        assert tokens_of(engine, answers) == list(answers.values())
    drafting = {shape for shape in executor.shapes if dict(shape.pages).keys() == {DRAFT_GROUP}}
    assert drafting, "blocks are steps of the executor, too"
    steps = set(executor.shapes) - drafting
    assert {shape.verify.requests for shape in steps} <= {0, *sizes}
    assert {shape.verify.rows for shape in steps} <= {0, 4, 8, 16, 64}
    assert len(set(executor.shapes)) == len(executor.shapes)
