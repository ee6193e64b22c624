"""Which rows a step has: budget, chunks, admission, preemption, priorities."""

from __future__ import annotations

from typing import Any

import pytest

from ml4core.engine.block_pool import BlockPool
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.request import Request, Status
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import Schedule, Scheduler, SchedulerConfig

BLOCK = 4


def scheduler(blocks: int = 100, caching: bool = False, **config: Any) -> Scheduler:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | config
    groups = [KVGroup("latent"), KVGroup("index")]
    pools = {group.name: BlockPool(group.name, blocks) for group in groups}
    rows = settings["max_num_batched_tokens"]
    kv = KVManager(groups, pools, BLOCK, step_rows=rows, caching=caching)
    return Scheduler(SchedulerConfig(**settings), kv)


def request(order: int, tokens: int, made: int = 100, **fields: Any) -> Request:
    ids = [order * 1000 + i for i in range(tokens)]
    params = SamplingParams(max_tokens=made)
    return Request(str(order), ids, params, tokens + made, order=order, **fields)


def rows(step: Schedule) -> dict[str, int]:
    return {work.request.id: work.rows for work in step.work}


def run(one: Scheduler, token: int = 5) -> dict[str, int]:
    """Schedules a step, runs it, and draws a token where it draws one."""
    step = one.schedule()
    for work in step.work:
        if one.confirm(work) and work.draws:
            work.request.append(token)
    return rows(step)


def test_a_step_is_filled_and_prompts_are_cut_into_chunks() -> None:
    one = scheduler()
    for order, tokens in enumerate((10, 20, 5)):
        one.add(request(order, tokens))
    assert run(one) == {"0": 10, "1": 6}
    assert run(one) == {"0": 1, "1": 14, "2": 1}
    assert run(one) == {"0": 1, "1": 1, "2": 4}
    assert run(one) == {"0": 1, "1": 1, "2": 1}


def test_a_part_of_a_prompt_draws_nothing() -> None:
    one = scheduler()
    one.add(request(0, 20))
    (work,) = one.schedule().work
    assert (work.start, work.end, work.draws) == (0, 16, False)
    one.confirm(work)
    (work,) = one.schedule().work
    assert (work.start, work.end, work.draws) == (16, 20, True)


def test_no_more_sequences_than_allowed_and_no_long_chunk_of_one() -> None:
    one = scheduler(max_num_seqs=2, long_prefill_token_threshold=3)
    for order in range(3):
        one.add(request(order, 7))
    assert run(one) == {"0": 3, "1": 3}
    assert run(one) == {"0": 3, "1": 3}
    assert run(one) == {"0": 1, "1": 1}
    one.finish([one.running[0]], Status.FINISHED_ABORT)
    assert run(one) == {"1": 1, "2": 3}


def test_a_request_begins_only_if_all_its_tokens_fit_beside_those_begun() -> None:
    """Chunks alone would let both begin and preempt each other half way."""
    one = scheduler(blocks=11)  # 40 tokens
    one.add(request(0, 30))
    one.add(request(1, 30))
    assert run(one) == {"0": 16}
    assert run(one) == {"0": 14}
    for _ in range(5):
        assert run(one) == {"0": 1}
    thrash = scheduler(blocks=11, reserve_full=False)
    thrash.add(request(0, 30))
    thrash.add(request(1, 30))
    run(thrash)
    assert run(thrash) == {"0": 14, "1": 2}
    for _ in range(8):
        run(thrash)
    assert thrash.preemptions > 0


def test_the_last_to_come_is_preempted_and_comes_back_first() -> None:
    one = scheduler(blocks=8, max_num_batched_tokens=64)  # 28 tokens
    for order in range(4):
        one.add(request(order, 6))
    assert run(one) == {"0": 6, "1": 6, "2": 6}  # six pages of seven
    one.add(request(9, 1))
    preempted = []
    while len(preempted) < 2:
        step = one.schedule()
        preempted += [r.id for r in step.preempted]
        for work in step.work:
            one.confirm(work)
            if work.draws:
                work.request.append(5)
    assert preempted == ["2", "1"]
    assert [r.id for r in one.waiting] == ["1", "2", "3", "9"]
    assert [r.status for r in one.waiting] == [Status.PREEMPTED] * 2 + [Status.WAITING] * 2


def test_a_resumed_request_computes_prompt_and_output_once() -> None:
    """B068."""
    one = scheduler(max_num_batched_tokens=64)
    victim = request(0, 3, made=500)
    one.add(victim)
    for _ in range(50):
        run(one)
    output = list(victim.output_ids)
    assert len(output) == 50
    step = Schedule()
    one._preempt(step, victim)
    assert victim.pages == {}
    (work,) = one.schedule().work
    assert (work.start, work.end, work.draws) == (0, 53, True)
    one.confirm(work)
    assert (victim.output_ids, len(victim.prompt_ids), victim.num_cached_tokens) == (output, 3, 0)
    victim.append(5)
    assert run(one) == {"0": 1}


def test_a_resumed_request_finds_its_own_pages() -> None:
    one = scheduler(max_num_batched_tokens=64, caching=True)
    victim = request(0, 3, made=500)
    one.add(victim)
    for _ in range(20):
        run(one)
    one._preempt(Schedule(), victim)
    (work,) = one.schedule().work
    assert (work.start, work.end) == (20, 23)
    assert victim.num_cached_tokens == 0, "what its own output brought is no hit of the prompt"


def test_by_priority_the_least_urgent_goes_even_if_it_has_its_rows_already() -> None:
    one = scheduler(blocks=7, policy="priority")  # 24 tokens
    low = request(0, 6, priority=5)
    one.add(low)
    assert run(one) == {"0": 6}
    one.add(request(1, 8, priority=1))
    one.add(request(2, 7, priority=1))
    assert run(one) == {"0": 1, "1": 8, "2": 7}
    assert [r.id for r in one.running] == ["0", "1", "2"]
    step = one.schedule()
    assert [r.id for r in step.preempted] == ["0"]
    assert rows(step) == {"1": 1, "2": 1}
    assert (low.num_computed, low.num_placeholders, low.pages) == (0, 0, {})


def test_none_begins_in_a_step_that_preempts() -> None:
    """Else what was taken from one is gone before it has helped another."""
    one = scheduler(blocks=7, policy="priority", max_num_seqs=2, max_num_batched_tokens=24)
    for order, priority in enumerate([5, 1]):
        one.add(request(order, 11, priority=priority))
    run(one)
    assert run(one) == {"0": 1, "1": 1}
    one.add(request(2, 1, priority=0))
    step = one.schedule()
    assert [r.id for r in step.preempted] == ["0"]
    assert (rows(step), step.admitted) == ({"1": 1}, [])
    for work in step.work:
        one.confirm(work)
        work.request.append(5)
    assert run(one) == {"1": 1, "2": 1}


def test_one_that_preempts_itself_holds_up_no_other() -> None:
    one = scheduler(blocks=7, policy="priority")
    for order, (tokens, priority) in enumerate([(7, 5), (5, 1), (5, 1)]):
        one.add(request(order, tokens, priority=priority))
    assert run(one) == {"1": 5, "2": 5, "0": 6}
    assert run(one) == {"1": 1, "2": 1, "0": 1}
    assert run(one) == {"1": 1, "2": 1, "0": 1}
    one.running.sort(key=lambda r: r.order)
    step = one.schedule()
    assert [r.id for r in step.preempted] == ["0"]
    assert rows(step) == {"1": 1, "2": 1}


def test_by_priority_the_urgent_begin_first() -> None:
    one = scheduler(max_num_seqs=1, policy="priority")
    for order, (priority, arrival) in enumerate([(1, 1.0), (0, 3.0), (0, 2.0), (0, 2.0)]):
        one.add(request(order, 2, made=1, priority=priority, arrival=arrival))
    begun = []
    while one.has_requests:
        (work,) = one.schedule().work
        begun.append(work.request.id)
        one.finish([work.request], Status.FINISHED_LENGTH)
    assert begun == ["2", "3", "1", "0"]


def test_what_has_ended_is_void() -> None:
    one = scheduler()
    made = request(0, 3)
    one.add(made)
    (work,) = one.schedule().work
    one.finish([made], Status.FINISHED_ABORT)
    assert work.stale
    assert not one.confirm(work)
    assert (one.has_requests, one.kv.usage()) == (False, {"latent": 0, "index": 0})
    one.finish([made], Status.FINISHED_ABORT)  # twice does nothing
    assert made.status is Status.FINISHED_ABORT


def test_placeholders_stand_for_tokens_in_flight_up_to_the_limit() -> None:
    one = scheduler()
    made = request(0, 3, made=3)
    one.add(made)
    steps = [one.schedule() for _ in range(5)]
    spans = [[(w.start, w.end, w.draws) for w in step.work] for step in steps]
    assert spans == [[(0, 3, True)], [(3, 4, True)], [(4, 5, True)], [], []]
    assert made.num_placeholders == 3
    for step in steps[:3]:
        assert one.confirm(step.work[0])
        made.append(7)
    assert (made.num_placeholders, made.num_tokens) == (0, made.limit)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 17}, "each of 17 sequences needs a row"),
        ({"policy": "lifo"}, "known: fcfs, priority"),
    ],
)
def test_bad_limits_are_named(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        scheduler(**config)


def test_prompts_with_logprobs_take_few_rows_a_step() -> None:
    """Each of their rows takes logits of the whole vocabulary; rows of others are not fewer."""
    one = scheduler(max_report_rows=5)
    asking = SamplingParams(max_tokens=4, prompt_logprobs=0)
    for order, params in enumerate((asking, asking, None)):
        made = request(order, 8)
        made.params = params or made.params
        one.add(made)
    taken = []
    for _ in range(6):
        step = one.schedule()
        taken.append([(int(w.request.id), w.rows) for w in step.work])
        for work in step.work:
            assert one.confirm(work)
            known = min(work.end, len(work.request.prompt_ids) - 1)
            work.request.prompt_logprobs[:] = [{}] * known
            if work.draws:
                work.request.append(7)
    assert taken[:4] == [
        [(0, 5)],
        [(0, 3), (1, 2), (2, 8)],
        [(0, 1), (1, 5), (2, 1)],
        [(0, 1), (1, 1), (2, 1)],
    ]
