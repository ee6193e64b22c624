"""The engine core over a runner whose tokens depend on every key they should have seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ml4core.api import FaultError
from ml4core.compose.contract import ContractError
from ml4core.engine.errors import RequestError
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.sampling_params import SamplingParams, child_seed

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
WINDOWED = (KVGroup("latent"), KVGroup("index"), KVGroup("window", window=11))

Make = Callable[..., Any]
Expect = Callable[..., list[int]]


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("caching", [False, True])
def test_batched_equals_alone(make_rig: Make, expect: Expect, overlap: bool, caching: bool) -> None:
    rig = make_rig(overlap=overlap, caching=caching)
    prompts = {str(i): ids(1 + 5 * i, i) for i in range(7)}
    for name, prompt in prompts.items():
        rig.core.add_request(name, prompt, GREEDY)
    rig.run()
    assert rig.tokens == {(name, 0): expect(prompt, GREEDY) for name, prompt in prompts.items()}
    assert set(rig.ends.values()) == {"length"}
    rig.assert_empty()


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_a_prompt_in_chunks_equals_a_whole_one(
    make_rig: Make, expect: Expect, overlap: bool, rows: int
) -> None:
    """B007."""
    rig = make_rig(overlap=overlap, max_num_seqs=1, max_num_batched_tokens=rows)
    rig.core.add_request("a", ids(40), GREEDY)
    rig.run()
    assert rig.tokens["a", 0] == expect(ids(40), GREEDY)


@pytest.mark.parametrize("groups", [WINDOWED[:2], WINDOWED])
def test_preempted_equals_undisturbed_and_usage_is_the_same(
    make_rig: Make, expect: Expect, overlap: bool, groups: Any
) -> None:
    """B068."""
    for caching in (False, True):
        rig = make_rig(16, groups=groups, overlap=overlap, caching=caching)
        params = replace(GREEDY, max_tokens=40)
        prompts = {str(i): ids(3 + i, i) for i in range(4)}
        for name, prompt in prompts.items():
            rig.core.add_request(name, prompt, params)
        rig.run()
        assert rig.core.stats().preemptions > 0
        for name, prompt in prompts.items():
            assert rig.tokens[name, 0] == expect(prompt, params)
            last = rig.last[name, 0]
            assert (last.prompt_tokens, last.output_tokens) == (len(prompt), 40)
            assert last.cached_tokens == 0
        rig.assert_empty()


def test_a_prefix_hit_equals_a_miss_and_is_counted(
    make_rig: Make, expect: Expect, overlap: bool
) -> None:
    """B025, B029: also for a second turn on the first one's answer."""
    rig = make_rig(overlap=overlap, caching=True)
    first = ids(23)
    rig.core.add_request("first", first, GREEDY)
    rig.run()
    second = first + rig.tokens["first", 0] + ids(5, 9)
    rig.core.add_request("again", first, GREEDY)
    rig.core.add_request("second", second, GREEDY)
    rig.run()
    assert rig.tokens["again", 0] == rig.tokens["first", 0] == expect(first, GREEDY)
    assert rig.tokens["second", 0] == expect(second, GREEDY)
    assert rig.last["first", 0].cached_tokens == 0
    assert rig.last["again", 0].cached_tokens == 20
    assert rig.last["second", 0].cached_tokens == 28, "of 30 tokens with keys"
    stats = rig.core.stats()
    assert stats.cache_queries == {"latent": 23 + 23 + 36, "index": 23 + 23 + 36}
    assert stats.cache_hits == {"latent": 48, "index": 48}
    rig.assert_empty()


def test_no_hit_across_salts(make_rig: Make) -> None:
    """B056."""
    rig = make_rig(caching=True)
    cached = []
    for turn, salt in enumerate(["a", "b", "a", None, None]):
        rig.core.add_request(str(turn), ids(20), GREEDY, cache_salt=salt)
        rig.run()
        cached.append(rig.last[str(turn), 0].cached_tokens)
    assert cached == [0, 0, 16, 0, 16]
    assert rig.core.reset_prefix_cache()
    rig.core.add_request("after", ids(20), GREEDY)
    rig.run()
    assert rig.last["after", 0].cached_tokens == 0


@pytest.mark.parametrize("tokens", [16, 17, 23])
def test_a_drafter_changes_no_hit(make_rig: Make, tokens: int) -> None:
    """B050."""
    draft = KVGroup("draft", window=6, required=False)
    cached = {}
    for groups in (WINDOWED[:2], (*WINDOWED[:2], draft)):
        rig = make_rig(groups=groups, caching=True)
        for name in "ab":
            rig.core.add_request(name, ids(tokens), GREEDY)
            rig.run()
        cached[len(groups)] = rig.last["b", 0].cached_tokens
        assert rig.core.stats().cache_hits["latent"] > 0
    assert cached[2] == cached[3] == (tokens - 1) // 4 * 4


def test_what_neighbours_do_changes_nothing(make_rig: Make, expect: Expect, overlap: bool) -> None:
    """Cancelled while waiting, in a prefill, and while decoding."""
    rig = make_rig(overlap=overlap, max_num_seqs=3, caching=True)
    names = [str(i) for i in range(8)]
    prompts = {name: ids(4 + 9 * i, i) for i, name in enumerate(names)}
    for name in names:
        rig.core.add_request(name, prompts[name], replace(GREEDY, max_tokens=12))
    for name in ("7", "1"):
        rig.core.abort(name)
    for step in range(12):
        rig.step()
        if step in (1, 4, 7, 10):
            rig.core.abort(names[2 + step // 3])
    rig.core.abort("not there")
    rig.run()
    for name in names:
        want = expect(prompts[name], replace(GREEDY, max_tokens=12))
        got = rig.tokens[name, 0]
        assert got == want[: len(got)]
        assert rig.ends[name, 0] == "abort" or got == want
    assert {rig.ends[name, 0] for name in ("7", "1")} == {"abort"}
    assert "length" in rig.ends.values()
    rig.assert_empty()


def test_a_stop_token_ends_an_answer_and_what_is_in_flight_is_dropped(
    make_rig: Make, expect: Expect, overlap: bool
) -> None:
    full = expect(ids(6), GREEDY)
    for stop in range(1, 6):
        rig = make_rig(overlap=overlap, eos=frozenset({full[stop]}))
        rig.core.add_request("a", ids(6), GREEDY)
        rig.core.add_request("b", ids(6), replace(GREEDY, ignore_eos=True))
        rig.core.add_request("c", ids(6), replace(GREEDY, min_tokens=stop + 2, max_tokens=8))
        rig.run()
        assert rig.tokens["a", 0] == full[: stop + 1]
        assert rig.tokens["b", 0] == rig.tokens["c", 0] == full
        assert (rig.ends["a", 0], rig.ends["b", 0]) == ("stop", "length")
        rig.assert_empty()


def test_overlap_looks_at_a_step_after_the_next_is_launched(make_rig: Make) -> None:
    rig = make_rig(overlap=True)
    rig.core.add_request("a", ids(3), replace(GREEDY, max_tokens=3))
    assert rig.step() == []
    seen = []
    while rig.core.has_work:
        before = rig.runner.steps
        outputs = rig.step()
        seen.append((rig.runner.steps - before, [o.output_tokens for o in outputs]))
    assert seen == [(1, [1]), (1, [2]), (0, [3])], "and none is launched beyond the limit"


def test_answers_of_one_request_are_apart(make_rig: Make, expect: Expect, overlap: bool) -> None:
    """B104."""
    params = SamplingParams(n=4, seed=7, temperature=1.0, max_tokens=6)
    found = []
    for caching in (False, True):
        rig = make_rig(overlap=overlap, caching=caching)
        rig.core.add_request("a", ids(9), params)
        rig.core.add_request("b", ids(9), replace(params, n=1))
        rig.run()
        answers = [rig.tokens["a", i] for i in range(4)]
        assert answers == [expect(ids(9), params, child_seed(7, i)) for i in range(4)]
        assert len({tuple(answer) for answer in answers}) == 4
        assert rig.tokens["b", 0] == answers[0]
        assert sorted(rig.ends) == [*(("a", i) for i in range(4)), ("b", 0)]
        found.append(answers)
        rig.assert_empty()
    assert found[0] == found[1]
    with pytest.raises(RequestError, match=r"n: 9 .*at most 8"):
        rig.core.add_request("c", ids(9), replace(params, n=9))


def test_one_answer_may_be_ended_alone(make_rig: Make, expect: Expect, overlap: bool) -> None:
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=9)
    rig = make_rig(overlap=overlap)
    rig.core.add_request("a", ids(9), params)
    for _ in range(3):
        rig.step()
    rig.core.abort("a", 1)
    rig.run()
    assert [rig.ends["a", i] for i in range(3)] == ["length", "abort", "length"]
    for index in (0, 2):
        assert rig.tokens["a", index] == expect(ids(9), params, child_seed(7, index))
    rig.core.add_request("a", ids(2), GREEDY)  # the name is free again
    rig.core.abort("a")


def test_requests_without_a_seed_draw_apart(make_rig: Make) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=6)
    answers = []
    for seed in (0, 0, 1):
        rig = make_rig(seed=seed)
        for name in "ab":
            rig.core.add_request(name, ids(9), params)
        rig.run()
        answers += [(rig.tokens["a", 0], rig.tokens["b", 0])]
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][0] != answers[0][1]


@pytest.mark.parametrize("raised", [None, ValueError("odd"), SystemExit(5), ContractError("odd")])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_no_token_of_a_failed_step_leaves(
    make_rig: Make, expect: Expect, overlap: bool, at: int, raised: BaseException | None
) -> None:
    rig = make_rig(overlap=overlap)
    rig.runner.fail_at, rig.runner.error = at, raised
    for i in range(3):
        rig.core.add_request(str(i), ids(5, i), GREEDY)
    for _ in range(20):
        rig.step()
        if rig.core.fault is not None:
            break
    kind = "contract" if isinstance(raised, ContractError) else "exception"
    assert rig.core.fault.code == (kind if raised else "null")
    assert rig.core.cause is raised
    assert raised is None or "/engine/conftest.py:" in rig.core.fault.message, "says no place"
    for i in range(3):
        assert rig.ends[str(i), 0] == "error"
        got = rig.tokens[str(i), 0]
        # With a step in flight, an error that comes at launch keeps the one before from leaving.
        assert len(got) in ((at - 1, at - 2) if overlap and raised else (at - 1,))
        assert got == expect(ids(5, i), GREEDY)[: len(got)]
    for _ in range(2):
        with pytest.raises(FaultError):
            rig.core.step()
        with pytest.raises(FaultError):
            rig.core.add_request("later", [1], GREEDY)
    assert all(pool.used_pages == 0 for pool in rig.kv.pools.values())


@pytest.mark.parametrize(
    ("prompt", "params", "told"),
    [
        ([], {}, "prompt: empty"),
        ([1000], {}, "prompt, token 0: 1000 .*ids from 0 to 999"),
        ([0, -1], {}, "prompt, token 1: -1"),
        ([1] * 200, {}, "prompt: 200 tokens .*at most 199"),
        ([1], {"stop_token_ids": (1000,)}, "stop_token_ids: 1000"),
        ([1] * 30, {"max_tokens": 16}, "prompt with its answer: 46 tokens .*at most 45"),
    ],
)
def test_bad_requests_are_refused_and_disturb_nobody(
    make_rig: Make, expect: Expect, prompt: list[int], params: dict[str, Any], told: str
) -> None:
    """B106."""
    rig = make_rig(12)
    rig.core.add_request("good", ids(5), GREEDY)
    rig.step()
    with pytest.raises(RequestError, match=told):
        rig.core.add_request("bad", prompt, replace(GREEDY, **params))
    with pytest.raises(RequestError, match="request id: good"):
        rig.core.add_request("good", [1], GREEDY)
    rig.run()
    assert rig.tokens == {("good", 0): expect(ids(5), GREEDY)}
    rig.assert_empty()


def test_lengths_at_the_edge(make_rig: Make, expect: Expect, overlap: bool) -> None:
    """B106."""
    rig = make_rig(overlap=overlap, max_model_len=20)
    for name, tokens, most in [("a", 19, 8), ("b", 12, 8), ("c", 1, None), ("d", 12, 1)]:
        rig.core.add_request(name, ids(tokens), replace(GREEDY, max_tokens=most))
    rig.run()
    made = {name: len(tokens) for (name, _), tokens in rig.tokens.items()}
    assert made == {"a": 1, "b": 8, "c": 19, "d": 1}
    assert set(rig.ends.values()) == {"length"}
    rig.assert_empty()


def test_the_longest_that_is_said_to_fit_does(make_rig: Make, overlap: bool) -> None:
    for groups, blocks in (
        (WINDOWED[:2], 12),
        (WINDOWED, {"latent": 12, "index": 12, "window": 9}),
    ):
        rig = make_rig(blocks, groups=groups, overlap=overlap, max_num_seqs=2, max_model_len=400,
                       max_num_batched_tokens=8)  # fmt: skip
        rig.core.add_request("a", ids(30), replace(GREEDY, max_tokens=15))
        rig.run()
        assert rig.core.stats().preemptions == 0
        assert len(rig.tokens["a", 0]) == 15


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("rows", [64, 4000])
def test_pools_fill_without_preemption(
    make_rig: Make, overlap: bool, caching: bool, rows: int
) -> None:
    rig = make_rig(
        501, caching=caching, overlap=overlap, max_num_seqs=64, max_num_batched_tokens=rows,
        max_model_len=4000,
    )  # fmt: skip
    for i in range(50):  # 40 tokens with keys each: the key of the last token is never needed
        rig.core.add_request(str(i), ids(20, i), replace(GREEDY, max_tokens=21))
    peak = 0.0
    while rig.core.has_work:
        rig.step()
        peak = max(peak, rig.core.stats().usage["latent"])
        held = sum(request.num_confirmed for request in rig.core.scheduler.running)
        assert held <= 2000
    assert peak >= (0.99 if rows == 4000 else 0.6)
    assert rig.core.stats().preemptions == 0
    # One that needs all of it.
    rig.core.add_request("all", ids(1900), replace(GREEDY, max_tokens=101))
    rig.run()
    assert rig.ends["all", 0] == "length"
    with pytest.raises(RequestError, match="at most 2001"):
        rig.core.add_request("more", ids(1900), replace(GREEDY, max_tokens=102))


def test_priorities_decide_who_is_served_first(make_rig: Make) -> None:
    rig = make_rig(policy="priority", max_num_seqs=1)
    for name, priority in [("later", 9), ("soon", -1), ("then", 2)]:
        rig.core.add_request(name, ids(3), GREEDY, priority=priority)
    rig.run()
    assert [name for name, _ in rig.ends] == ["soon", "then", "later"]


def test_rows_of_a_step_are_in_order(make_rig: Make) -> None:
    rig = make_rig(max_num_batched_tokens=40)
    rig.runner.keep_plans = True
    for i, tokens in enumerate((3, 12, 7, 1)):
        rig.core.add_request(str(i), ids(tokens, i), GREEDY)
        rig.step()
    rig.core.add_request("x", ids(9), GREEDY)
    rig.core.add_request("y", ids(5), GREEDY)
    rig.step()
    shape = rig.runner.plans[-1].shape
    assert (shape.decode.rows, shape.prefill.rows, shape.prefill.max_rows) == (4, 14, 9)
    assert rig.runner.plans[-1].query_start.tolist() == [0, 1, 2, 3, 4, 9, 18]


@pytest.mark.parametrize(
    "part", [*range(5), *(pytest.param(part, marks=pytest.mark.slow) for part in range(5, 10))]
)
def test_random_mixes_are_right_and_leak_nothing(make_rig: Make, expect: Expect, part: int) -> None:
    """1,000 in all: pools, limits, policies, groups, arrivals and cancellations at random."""
    for seed in range(part * 100, part * 100 + 100):
        rng = random.Random(seed)
        seqs = rng.randint(1, 6)
        groups = rng.choice([WINDOWED[:1], WINDOWED[:2], WINDOWED])
        rig = make_rig(
            rng.choice([12, 16, 40]),
            groups=groups,
            block_size=rng.choice([3, 4]),
            caching=rng.random() < 0.6,
            overlap=rng.random() < 0.5,
            max_num_seqs=seqs,
            max_num_batched_tokens=rng.randint(seqs, 14),
            policy=rng.choice(["fcfs", "priority"]),
            long_prefill_token_threshold=rng.choice([0, 3]),
            reserve_full=rng.random() < 0.7,
        )
        eos = rng.sample(range(1000), 60)
        wanted: dict[tuple[str, int], list[int]] = {}
        for i in range(rng.randint(1, 8)):
            n = rng.choice([1, 1, 1, min(2, seqs)])
            params = SamplingParams(
                n=n,
                temperature=1.0 if n > 1 else rng.choice([0.0, 1.0]),
                seed=rng.randrange(99),
                max_tokens=rng.randint(1, 10),
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


class CoreMachine(RuleBasedStateMachine):
    """Arrivals, cancellations and steps in any order. Set up by the test below."""

    make_rig: Make
    expect: Expect

    def __init__(self) -> None:
        super().__init__()
        self.rig = type(self).make_rig(
            14, groups=WINDOWED, caching=True, overlap=True, max_num_seqs=4,
            max_num_batched_tokens=9, policy="priority",
        )  # fmt: skip
        self.wanted: dict[tuple[str, int], list[int]] = {}
        self.aborted: set[str] = set()

    @rule(
        shared=st.integers(0, 3),
        own=st.integers(1, 6),
        made=st.integers(1, 12),
        priority=st.integers(0, 2),
    )
    def arrive(self, shared: int, own: int, made: int, priority: int) -> None:
        name = str(len(self.wanted))
        prompt = [1] * (4 * shared) + ids(own, own)
        params = SamplingParams(temperature=0.0, max_tokens=made)
        self.rig.core.add_request(name, prompt, params, priority=priority)
        self.wanted[name, 0] = type(self).expect(prompt, params)

    @precondition(lambda self: self.rig.core.has_work)
    @rule()
    def step(self) -> None:
        self.rig.step()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name, _ = data.draw(st.sampled_from(sorted(self.wanted)))
        self.rig.core.abort(name)
        self.aborted.add(name)

    @invariant()
    def limits_hold(self) -> None:
        core = self.rig.core
        assert len(core.scheduler.running) <= 4
        for group, pool in self.rig.kv.pools.items():
            refs = [0] * pool.blocks
            for request in core.scheduler.running:
                for page in request.pages[group]:
                    refs[page] += page > 0
            assert refs == [pool.refs(page) for page in range(pool.blocks)]
        for request in core.scheduler.waiting:
            assert request.pages == {}
        slots = [request.slot for request in core.scheduler.running]
        assert len(set(slots)) == len(slots)

    def teardown(self) -> None:
        self.rig.run()
        for key, want in self.wanted.items():
            got = self.rig.tokens.get(key, [])
            assert got == (want[: len(got)] if key[0] in self.aborted else want)
        self.rig.assert_empty()


def test_any_order_of_events(make_rig: Make, expect: Expect) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type(
        "Machine",
        (CoreMachine,),
        {"make_rig": staticmethod(make_rig), "expect": staticmethod(expect)},
    )
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
