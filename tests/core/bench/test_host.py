"""Host cost: the runner computes nothing, and each step gives each request a token."""

from __future__ import annotations

import pytest

from ml4core.bench import generation, host


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_a_token_of_each_request(overlap: bool) -> None:
    core = host.null_core(5, 200, overlap=overlap)
    prompts = generation.random_prompts(5, 100, host.VOCAB, seed=1)
    with generation.decoding(core, prompts, 12):
        for _ in range(12):
            outputs = core.step()
            assert sorted(output.request_id for output in outputs) == list("01234")
            assert all(len(output.token_ids) == 1 for output in outputs)
            assert all(output.finish_reason is None for output in outputs)
    assert not core.has_work
    assert all(pool.used_pages == 0 for pool in core.kv.pools.values())


def test_prompts_run_to_their_ends() -> None:
    core = host.null_core(3, 200, overlap=False)
    made = generation.run(core, generation.random_prompts(3, 70, host.VOCAB, seed=2), 9)
    assert [len(tokens) for tokens in made] == [9, 9, 9]


def test_every_count_is_measured_with_and_without_a_step_in_flight() -> None:
    found = host.measure((1, 3), 7)
    assert [(one.requests, one.overlap) for one in found] == [
        (1, False), (3, False), (1, True), (3, True),
    ]  # fmt: skip
    assert all(one.seconds.repeats == 7 and one.seconds.low > 0 for one in found)
    assert [one.target for one in found[:2]] == [host.TARGETS[1], None]


def test_prompts_differ_by_seed_and_stay_in_the_vocabulary() -> None:
    one, other = (generation.random_prompts(2, 50, 10, seed) for seed in (1, 2))
    assert one != other
    assert one == generation.random_prompts(2, 50, 10, 1)
    assert {len(prompt) for prompt in one} == {50}
    assert {token for prompt in one for token in prompt} == set(range(10))
