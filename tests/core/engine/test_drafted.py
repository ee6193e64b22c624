"""The engine core with a drafter, over a runner that checks every key: drafts change no token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ml4core.api import StepBuckets
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.sampling_params import SamplingParams, child_seed

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PLAIN = (KVGroup("latent"), KVGroup("index"))

Make = Callable[..., Any]
Expect = Callable[..., list[int]]


def groups(depth: int, window: int = 6) -> tuple[KVGroup, ...]:
    return (*PLAIN, KVGroup("draft", window=window, required=False, ahead=depth))


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("skill", [0.0, 0.6, 1.0])
def test_drafted_equals_plain(
    make_rig: Make, expect: Expect, overlap: bool, depth: int, skill: float
) -> None:
    rig = make_rig(
        groups=groups(depth), overlap=overlap, drafts=depth, skill=skill, max_num_batched_tokens=40
    )
    prompts = {str(i): ids(1 + 5 * i, i) for i in range(7)}
    for name, prompt in prompts.items():
        rig.core.add_request(name, prompt, GREEDY)
    rig.run()
    assert rig.tokens == {(name, 0): expect(prompt, GREEDY) for name, prompt in prompts.items()}
    assert set(rig.ends.values()) == {"length"}
    counts = rig.core.stats().drafts
    assert counts.drafts == sum(rig.last[key].drafts.drafts for key in rig.last)
    assert counts.accepted_tokens == sum(rig.last[key].drafts.accepted_tokens for key in rig.last)
    if skill == 0:
        assert (counts.accepted_tokens, counts.acceptance_length) == (0, 1)
    if skill == 1:  # B066: every place, and a cut of the last window is no rejection
        assert counts.accepted_tokens == counts.draft_tokens
        assert counts.acceptance_by_position[0] == 1
    assert rig.runner.lacking == 0
    rig.assert_empty()


@pytest.mark.parametrize("made", range(1, 12))
def test_no_token_beyond_a_limit_and_no_step_too_many(
    make_rig: Make, expect: Expect, overlap: bool, made: int
) -> None:
    rig = make_rig(groups=groups(3), overlap=overlap, drafts=3, skill=1.0, max_model_len=20)
    params = replace(GREEDY, max_tokens=made)
    rig.core.add_request("a", ids(4), params)
    rig.core.add_request("b", ids(19), params)
    rig.run()
    assert rig.tokens["a", 0] == expect(ids(4), params)
    assert len(rig.tokens["b", 0]) == 1
    if not overlap:
        assert rig.runner.steps == max(2, 1 + -(-(made - 1) // 4)), "windows of four tokens"
    rig.assert_empty()


def test_a_stop_within_an_accepted_run_ends_it(
    make_rig: Make, expect: Expect, overlap: bool
) -> None:
    full = expect(ids(6), GREEDY)
    for stop in range(1, 8):
        rig = make_rig(
            groups=groups(3), overlap=overlap, drafts=3, skill=1.0, eos=frozenset({full[stop]})
        )
        rig.core.add_request("a", ids(6), GREEDY)
        rig.core.add_request("b", ids(6), replace(GREEDY, ignore_eos=True))
        rig.core.add_request("c", ids(6), replace(GREEDY, min_tokens=stop + 2))
        rig.run()
        assert rig.tokens["a", 0] == full[: stop + 1]
        assert rig.last["a", 0].output_tokens == stop + 1
        assert rig.tokens["b", 0] == rig.tokens["c", 0] == full
        assert (rig.ends["a", 0], rig.ends["b", 0]) == ("stop", "length")
        rig.assert_empty()


def test_drafts_keep_no_request_from_its_row(make_rig: Make, overlap: bool) -> None:
    """Five rows a step hold one window, and a token for each of four requests."""
    rig = make_rig(
        groups=groups(3), overlap=overlap, drafts=3, skill=1.0, max_num_seqs=4,
        max_num_batched_tokens=5,
    )  # fmt: skip
    for name, made in (("a", 40), ("b", 12), ("c", 12), ("d", 12)):
        rig.core.add_request(name, [1], replace(GREEDY, max_tokens=made))
    most = 0
    while rig.core.has_work:
        before = {key: len(tokens) for key, tokens in rig.tokens.items()}
        beside = len(before) == 4 and not rig.ends
        rig.step()
        grown = [len(rig.tokens[key]) - count for key, count in before.items()]
        assert not beside or grown == [1, 1, 1, 1]
        most = max([most, *grown])
    assert most == 4, "alone it has windows"


def test_rows_of_windows_are_padded_to_one_width(make_rig: Make) -> None:
    """The last window of an answer has fewer drafts, and the step's shape stays."""
    rig = make_rig(groups=groups(3), drafts=3, skill=1.0)
    rig.runner.keep_plans = True
    rig.core.add_request("a", ids(3), replace(GREEDY, max_tokens=8))
    rig.run()
    shapes = {plan.shape.verify for plan in rig.runner.plans[1:]}
    assert {(s.requests, s.rows, s.max_rows) for s in shapes} == {(1, 4, 4)}
    assert rig.runner.plans[-1].visible.tolist() == [8, 9, 10, 0]


def test_a_long_chunk_takes_pages_for_its_window_alone(
    make_rig: Make, expect: Expect, overlap: bool
) -> None:
    group = groups(3)[-1]
    most = group.pages_for(200, 4, 1000)
    blocks = {"latent": 80, "index": 80, "draft": 1 + most}
    for rows in (7, 64, 1000):
        rig = make_rig(
            blocks, groups=groups(3), overlap=overlap, drafts=3, max_num_seqs=1,
            max_num_batched_tokens=rows, max_model_len=400,
        )  # fmt: skip
        params = replace(GREEDY, max_tokens=60)
        rig.core.add_request("a", ids(140), params)
        rig.run()
        assert rig.tokens["a", 0] == expect(ids(140), params)
        assert rig.core.stats().preemptions == rig.runner.lacking == 0


def test_a_prefix_hit_is_as_long_as_without_a_drafter(
    make_rig: Make, expect: Expect, overlap: bool
) -> None:
    """B050; and the rows of the window are found again where they were kept."""
    for tokens in (16, 17, 23, 40):
        cached = []
        for drafts in (0, 3):
            rig = make_rig(
                groups=groups(3) if drafts else PLAIN, overlap=overlap, caching=True, drafts=drafts
            )
            for name in "ab":
                rig.core.add_request(name, ids(tokens), GREEDY)
                rig.run()
            assert rig.tokens["a", 0] == rig.tokens["b", 0] == expect(ids(tokens), GREEDY)
            cached.append(rig.last["b", 0].cached_tokens)
        assert cached[0] == cached[1] == (tokens - 1) // 4 * 4
        assert rig.runner.lacking == 0


def test_rows_that_a_hit_lacks_are_no_reason_against_it(make_rig: Make, expect: Expect) -> None:
    """The second prompt parts from the first long before the window that was kept."""
    rig = make_rig(groups=groups(3), caching=True, drafts=3, max_num_batched_tokens=64)
    first, second = ids(60), ids(60)[:40] + ids(2, 7)
    for name, prompt in (("a", first), ("b", second)):
        rig.core.add_request(name, prompt, GREEDY)
        rig.run()
        assert rig.tokens[name, 0] == expect(prompt, GREEDY)
    assert rig.last["b", 0].cached_tokens == 40
    assert rig.runner.lacking > 0
    assert rig.core.stats().cache_hits == {"latent": 40, "index": 40, "draft": 0}


@pytest.mark.parametrize(
    "part", [*range(5), *(pytest.param(part, marks=pytest.mark.slow) for part in range(5, 10))]
)
def test_random_mixes_are_right_and_leak_nothing(make_rig: Make, expect: Expect, part: int) -> None:
    for seed in range(part * 60, part * 60 + 60):
        rng = random.Random(seed)
        seqs, depth = rng.randint(1, 6), rng.randint(1, 3)
        sizes = [tuple(sorted(rng.sample(range(1, 30), 3))) for _ in range(6)]
        rig = make_rig(
            rng.choice([14, 18, 40]),
            groups=groups(depth, rng.choice([2, 6, 11, 40])),
            block_size=rng.choice([3, 4]),
            caching=rng.random() < 0.6,
            overlap=rng.random() < 0.5,
            buckets=StepBuckets(*sizes) if rng.random() < 0.3 else None,
            max_num_seqs=seqs,
            max_num_batched_tokens=rng.randint(seqs, 20),
            policy=rng.choice(["fcfs", "priority"]),
            long_prefill_token_threshold=rng.choice([0, 3]),
            reserve_full=rng.random() < 0.7,
            drafts=rng.randint(1, depth),
            skill=rng.choice([0.0, 0.5, 0.9, 1.0]),
        )
        eos = rng.sample(range(1000), 60)
        wanted: dict[tuple[str, int], list[int]] = {}
        for i in range(rng.randint(1, 8)):
            n = rng.choice([1, 1, 1, min(2, seqs)])
            params = SamplingParams(
                n=n,
                temperature=1.0 if n > 1 else rng.choice([0.0, 1.0]),
                seed=rng.randrange(99),
                max_tokens=rng.randint(1, 12),
                stop_token_ids=tuple(eos),
            )
            prompt = [rng.choice([1, 2])] * rng.randint(0, 9) + ids(rng.randint(1, 9), seed + i)
            rig.core.add_request(
                str(i), prompt, params, priority=rng.randint(0, 3),
                cache_salt=rng.choice([None, "s"]),
            )  # fmt: skip
            for index in range(n):
                seed_of = child_seed(params.seed or 0, index)
                wanted[str(i), index] = expect(prompt, params, seed_of, eos)
            for _ in range(rng.randint(0, 4)):
                if rig.core.has_work:
                    rig.step()
            if rng.random() < 0.2:
                rig.core.abort(str(rng.randint(0, i)))
        rig.run()
        assert rig.ends.keys() == wanted.keys()
        for key, end in rig.ends.items():
            got = rig.tokens.get(key, [])
            assert got == (wanted[key][: len(got)] if end == "abort" else wanted[key]), seed
        rig.assert_empty()
