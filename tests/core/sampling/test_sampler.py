"""Batches: mixtures, noise, what is asked of the op, and log probabilities."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.compose.contract import ContractError
from ml4core.engine import sampler as sampler_module
from ml4core.engine.sampler import Logprob, Sampler, SamplerRow
from ml4core.engine.sampling_params import SamplingParams, child_seed

from . import reference
from .rows import Recorder, ids, normal, row, sampler


def mixed_row(rng: random.Random, vocab: int) -> SamplerRow:
    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 9))]
    return row(
        prompt=prompt,
        output=[rng.choice(prompt) for _ in range(rng.randrange(6))],
        seed=rng.randrange(-(2**63), 2**63),
        stop_ids=frozenset({1, 2}),
        temperature=rng.choice([0.0, 0.0, 0.6, 1.0, 1.4]),
        top_k=rng.choice([0, 0, 1, 7]),
        top_p=rng.choice([1.0, 1.0, 0.8, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        min_tokens=rng.choice([0, 0, 3]),
        presence_penalty=rng.choice([0.0, 1.0]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logit_bias=rng.choice([None, {4: 2.5}]),
        allowed_token_ids=rng.choice([None, None, tuple(range(0, vocab, 3))]),
        logprobs=rng.choice([None, 0, 2, 5]),
    )


@pytest.mark.parametrize(("vocab", "dtype"), [(29, torch.float32), (1031, torch.bfloat16)])
def test_a_row_is_the_same_alone(vocab: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab)
    rows = [mixed_row(rng, vocab) for _ in range(60)]
    logits = (normal(vocab, 60, vocab) * 2).to(dtype)
    together = sampler(vocab)(logits, rows)
    alone = [sampler(vocab)(logits[i : i + 1], rows[i : i + 1])[0] for i in range(60)]
    assert together == alone
    backwards = sampler(vocab)(logits.flip(0), rows[::-1])
    assert backwards[::-1] == together
    assert len({token.token_id for token in together}) > 10


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (torch.tensor([3, 30]), "drew 30; ids are 0 to 29"),
        (torch.tensor([-1, 3]), "drew -1"),
        (torch.tensor([3]), r"returned shape and dtype \(\(1,\), torch.int64\); wanted: \(\(2,\)"),
        (torch.tensor([[3], [4]]), r"returned shape and dtype \(\(2, 1\)"),
        (torch.tensor([3.0, 4.0]), r"\(\(2,\), torch.float32\)"),
    ],
)
@pytest.mark.parametrize("greedy", [0, 1])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_what_the_op_may_not_draw(
    drawn: Tensor, message: str, greedy: int, logprobs: int | None
) -> None:
    """A mixed batch puts the op's ids among others: one id must not spread over all of them."""
    rows = [row(temperature=0.0)] * greedy + [row(logprobs=logprobs), row()]
    with pytest.raises(ContractError, match=f"backend 'mine', op 'sample'.*{message}"):
        Sampler({"sample": lambda *_: drawn}, 30, "mine")(normal(0, len(rows), 30), rows)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = normal(0, 1, 500).expand(4, -1)
    rows = [row(seed=s, position=p) for s, p in ((1, 5), (1, 6), (2, 5), (1, 5))]
    first, other_place, other_seed, again = ids(logits, rows)
    assert first == again
    assert len({first, other_place, other_seed}) == 3
    loose = row(range(3), range(2), seed=1, temperature=1.0, top_k=500, top_p=1.0)
    assert ids(logits[:1], [loose]) == [first]  # nothing is cut, so nothing changes


def test_plain_rows_build_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("no row asks for this")

    for name in ("truncate", "LogprobReport"):
        monkeypatch.setattr(sampler_module, name, never)
    op = Recorder()
    make = Sampler({"sample": op}, 20)
    monkeypatch.setattr(make, "_edit", never)
    logits = normal(1, 3, 20)
    make(logits, [row(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2)] * 3)
    assert not op.calls  # noise is not made for the greedy
    make(logits, [row(), row(temperature=0.5), row()])
    ((given, temperature),) = op.calls
    assert torch.equal(given, logits)
    assert temperature.tolist() == [1.0, 0.5, 1.0]


def test_greedy_ties_and_kinds() -> None:
    lines = torch.tensor([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0], [math.inf, math.nan, math.inf]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert ids(lines.to(dtype), [row(temperature=0.0)] * 3) == [1, 0, 0]
    wide = torch.zeros(2, 50_000)
    wide[:, [777, 778, 30_000]] = 1.0
    assert ids(wide, [row(temperature=0.0)] * 2) == [777, 777]


def test_shapes_are_checked() -> None:
    make = sampler(5)
    assert make(torch.zeros(0, 5), []) == []
    assert make.prompt_logprobs(torch.zeros(0, 5), [], 2) == []
    for logits in (torch.zeros(2, 5), torch.zeros(1, 6)):
        with pytest.raises(ValueError, match="1 rows of 5 are wanted"):
            make(logits, [row()])


def near(got: dict[int, Logprob], want: dict[int, tuple[float, int]]) -> bool:
    return list(got) == list(want) and all(
        one.rank == want[i][1] and one.logprob == pytest.approx(want[i][0], abs=2e-5)
        for i, one in got.items()
    )


def test_logprobs_are_those_of_the_model() -> None:
    """B064: each row's own numbers, before bias, penalties, temperature and cuts."""
    rng = random.Random(4)
    rows = [mixed_row(rng, 40) for _ in range(50)]
    logits = normal(4, 50, 40).mul(4).round().div(2)  # many ties
    logits[3, 5:9] = math.nan
    for token, one, line in zip(sampler(40)(logits, rows), rows, logits.tolist(), strict=True):
        count = one.params.logprobs
        if count is None:
            assert token.logprobs is None
        else:
            assert token.logprobs is not None
            assert near(token.logprobs, reference.logprobs(line, token.token_id, count))


def test_logprobs_change_no_token() -> None:
    rng = random.Random(5)
    rows = [mixed_row(rng, 40) for _ in range(30)]
    logits = normal(5, 30, 40)
    plain = [replace(one, params=replace(one.params, logprobs=None)) for one in rows]
    assert ids(logits, plain) == ids(logits, rows)


def test_prompt_logprobs() -> None:
    logits = normal(6, 7, 30)
    following = [3, 0, 29, 4, 4, 11, 7]
    for k in (0, 1, 30):
        found = sampler(30).prompt_logprobs(logits, following, k)
        for got, line, token in zip(found, logits.tolist(), following, strict=True):
            assert near(got, reference.logprobs(line, token, k))


def test_logprobs_of_infinite_logits() -> None:
    lines = torch.tensor([[math.inf, 0.0, math.inf], [-math.inf] * 3, [0.0, -math.inf, math.nan]])
    found = sampler(3).prompt_logprobs(lines, [2, 1, 2], 1)
    half = pytest.approx(math.log(0.5))
    assert found[0] == {2: Logprob(half, 2), 0: Logprob(half, 1)}
    assert found[1] == {1: Logprob(-math.inf, 2), 0: Logprob(-math.inf, 1)}
    assert found[2] == {2: Logprob(-math.inf, 3), 0: Logprob(0.0, 1)}


def test_inference_tensors_are_taken() -> None:
    with torch.inference_mode():
        logits: Tensor = normal(7, 4, 20)
    rows = [row(logit_bias={1: 2.0}, top_k=3, logprobs=1), row(), row(temperature=0.0), row()]
    assert len(sampler(20)(logits, rows)) == 4


def test_children_have_seeds_of_their_own() -> None:
    """B104: sequences of one request differ, and the same request makes the same set again."""
    for seed in (0, 7, -1, 2**63 - 1, -(2**63)):
        children = [child_seed(seed, i) for i in range(1000)]
        assert children[0] == seed
        assert len(set(children)) == 1000
        assert children == [child_seed(seed, i) for i in range(1000)]
        assert all(SamplingParams(seed=child).seed == child for child in children)
    assert not set(map(child_seed, [7] * 50, range(50))) & set(map(child_seed, [8] * 50, range(50)))
    logits = normal(8, 1, 2000).expand(4, -1)
    assert len(set(ids(logits, [row(seed=child_seed(7, i)) for i in range(4)]))) == 4
