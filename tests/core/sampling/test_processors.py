"""Masks, bias and penalties, against the reference."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from ml4core.engine.logits_processors import LogitsProcessors
from ml4core.engine.sampler import SamplerRow

from . import reference
from .rows import ids, normal, row

VOCAB = 61


def random_row(rng: random.Random) -> SamplerRow:
    some = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
    return row(
        prompt=some,
        output=[rng.choice([*some, rng.randrange(VOCAB)]) for _ in range(rng.randrange(0, 20))],
        stop_ids=frozenset(rng.sample(range(VOCAB), 3)) | {VOCAB + 5},
        min_tokens=rng.choice([0, 0, 5, 10]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7, -1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.5]),
        logit_bias=rng.choice([None, {rng.randrange(VOCAB): 4.0, 3: -100.0}]),
        allowed_token_ids=rng.choice([None, None, rng.sample(range(VOCAB), 20)]),
    )


@pytest.mark.parametrize("seed", range(5))
def test_random_mixtures(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(24)]
    logits = normal(seed, 24, VOCAB) * 3
    before = logits.clone()
    got = LogitsProcessors(VOCAB)(logits, rows)
    assert torch.equal(logits, before)
    for edited, line, one in zip(got, logits.tolist(), rows, strict=True):
        want = torch.tensor(reference.edited(line, one), dtype=torch.float64)
        torch.testing.assert_close(edited.double(), want, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_rows_honour_them_and_no_truncation(seed: int) -> None:
    rng = random.Random(100 + seed)
    rows = [random_row(rng) for _ in range(24)]
    logits = normal(seed, 24, VOCAB) * 3
    greedy = [
        replace(r, params=replace(r.params, temperature=0.0, top_k=5, top_p=0.1, min_p=0.9))
        for r in rows
    ]
    pairs = zip(logits.tolist(), rows, strict=True)
    assert ids(logits, greedy) == [reference.order(reference.edited(*pair))[0] for pair in pairs]


def test_penalties_count_every_token_of_the_output() -> None:
    """B060: a row of a verified run counts the tokens of the run before it."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    seen = []
    for run in range(4):
        one = row(output=[0, 0, 1, 0][:run], frequency_penalty=1.5, temperature=0.0)
        seen += ids(logits, [one])
    assert seen == [0, 1, 1, 2]
    runs = [
        row(output=[0, 0, 1, 0][:run], frequency_penalty=1.5, temperature=0.0) for run in range(4)
    ]
    assert ids(logits.expand(4, -1), runs) == seen


def test_the_prompt_counts_for_repetition_alone() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    assert ids(
        logits, [row([0], temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)]
    ) == [0]
    assert ids(logits, [row([0], temperature=0.0, repetition_penalty=1.1)]) == [1]
    got = LogitsProcessors(3)(logits, [row([2], repetition_penalty=2.0)])
    assert got.tolist() == [[2.0, pytest.approx(1.9), -2.0]]


def test_min_tokens_forbids_stops_until_they_are_made() -> None:
    logits = torch.tensor([[0.0, 5.0, 9.0, 1.0]])
    for made, want in ((0, 3), (2, 3), (3, 2), (4, 2)):
        one = row(output=[3] * made, min_tokens=3, stop_ids=frozenset({1, 2, 99}), temperature=0.0)
        assert ids(logits, [one]) == [want]


def test_min_tokens_yields_if_only_stops_are_allowed() -> None:
    one = row(min_tokens=3, stop_ids=frozenset({1, 2}), allowed_token_ids=[1], temperature=0.0)
    assert ids(torch.tensor([[7.0, 5.0, 9.0]]), [one]) == [1]


@pytest.mark.parametrize("top_k", [0, 1, 4])
def test_only_allowed_ids_are_drawn(top_k: int) -> None:
    rows = [
        row(position=i, allowed_token_ids=(9, 4, 4), top_k=top_k, logit_bias={5: 1e30})
        for i in range(200)
    ]
    drawn = set(ids(torch.zeros(200, 12), rows))
    assert drawn == ({4} if top_k == 1 else {4, 9})


def test_an_id_outside_the_vocabulary_touches_no_other_row() -> None:
    for output in ([-1], [5]):
        rows = [row(), row(output=output, presence_penalty=1.0)]
        with pytest.raises(ValueError, match=f"token id {output[0]}: ids are 0 to 4"):
            ids(torch.zeros(2, 5), rows)


def test_a_prompt_is_known_again_by_identity_alone() -> None:
    processors = LogitsProcessors(4)
    logits = torch.ones(1, 4)
    for prompt in ([0], [1], [2], [0, 3]):  # lists that may take each other's place in memory
        got = processors(logits, [row(list(prompt), repetition_penalty=2.0)])
        assert got.tolist() == [[0.5 if i in prompt else 1.0 for i in range(4)]]
    shared = [2, 2]
    both = row(shared, repetition_penalty=2.0, allowed_token_ids=(2, 2))
    for _ in range(2):
        assert processors(logits, [both]).tolist() == [[-math.inf, -math.inf, 0.5, -math.inf]]
