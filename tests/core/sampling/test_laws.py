"""The law of a draw, against the reference: top-k, top-p, min-p and their mixtures."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.engine import truncation
from ml4core.engine.sampler import Sampler
from ml4core.engine.truncation import truncate

from . import reference
from .rows import Recorder, ids, normal, row

VOCAB = 97


def random_params(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.3, 0.7, 1.0, 1.6]),
        "top_k": rng.choice([-1, 0, 1, 2, 5, 40, VOCAB, 1000]),
        "top_p": rng.choice([1.0, 0.999, 0.9, 0.6, 0.2, 1e-9]),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.2, 0.9, 1.0]),
    }


def laws(logits: Tensor, rows: list[Any]) -> Tensor:
    op = Recorder()
    Sampler({"sample": op}, logits.shape[-1])(logits, rows)
    return op.laws()


def check(got: Tensor, want: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [4, truncation.WIDTH])
def test_random_mixtures(seed: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "WIDTH", width)
    rng = random.Random(seed)
    rows = [row(**random_params(rng)) for _ in range(40)]
    logits = normal(seed, 40, VOCAB) * torch.linspace(0.2, 5, 40).unsqueeze(-1)
    for got, line, one in zip(laws(logits, rows), logits.tolist(), rows, strict=True):
        check(got, reference.law(line, one.params))


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.45}, {"min_p": 1.0}, {"top_k": 9}])
def test_ties_go_to_the_lowest_id(params: dict[str, Any]) -> None:
    line = [0.0, 1.0, 2.0, 2.0, 1.0, 2.0, 2.0, -0.0, 2.0]
    (got,) = laws(torch.tensor([line]), [row(**params)])
    check(got, reference.law(line, row(**params).params))


def test_equal_logits_are_cut_at_exactly_the_share() -> None:
    """Ten equal tokens: a share of 0.3 takes three, and the next float above it takes four."""
    line = torch.zeros(1, 10)
    for top_p, kept in ((0.3, 3), (0.3 + 1e-8, 4), (0.05, 1), (1.0, 10), (1 - 1e-8, 10)):
        (got,) = laws(line, [row(top_p=top_p)])
        assert (got > 0).tolist() == [True] * kept + [False] * (10 - kept)


def test_a_share_is_of_what_top_k_and_min_p_leave() -> None:
    line = [math.log(x) for x in (0.4, 0.3, 0.2, 0.06, 0.04)]
    for params in ({"top_k": 2, "top_p": 0.56}, {"min_p": 0.5, "top_p": 0.6}):
        (got,) = laws(torch.tensor([line]), [row(**params)])
        # 0.4 of 0.7 or 0.9 is below the share, so the second stays.
        check(got, reference.law(line, row(**params).params))
    (got,) = laws(torch.tensor([line]), [row(top_k=2, top_p=0.4, min_p=0.1)])
    check(got, [1, 0, 0, 0, 0])


def test_a_large_flat_vocabulary_is_searched_to_its_end() -> None:
    logits = normal(3, 3, 40_000) * 0.1
    rows = [row(top_p=p) for p in (0.9, 0.5, 0.01)]
    for got, line, one in zip(laws(logits, rows), logits, rows, strict=True):
        odds = torch.softmax(line.double(), -1).sort(descending=True).values
        kept = int((odds.cumsum(-1) - odds < one.params.top_p).sum())
        assert abs(int((got > 0).sum()) - kept) <= 1
        assert got[got > 0].min() >= got[got > 0].max() * math.exp(-2)
        assert abs(odds[: int((got > 0).sum())].sum() - one.params.top_p) < 1e-4


def test_the_greatest_and_the_least_of_logits() -> None:
    inf = math.inf
    lines = torch.tensor(
        [[inf, 0.0, inf, 3.0], [-inf, -inf, 1.0, -inf], [-inf] * 4, [3e38, -3e38, 3.1e38, 0.0]]
    )
    rows = [row(top_k=3, top_p=0.9, min_p=0.1, temperature=1e-3)] * 4
    kept = truncate(lines, [one.params for one in rows])
    assert torch.isinf(kept[0, 1])
    assert kept[0, 0] == inf
    assert kept[1].tolist() == lines[1].tolist()
    assert kept[2].tolist() == lines[2].tolist()
    assert kept[3].tolist() == [-inf, -inf, lines[3, 2].item(), -inf]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_never_wins(temperature: float) -> None:
    logits = normal(1, 8, 50)
    logits[:, ::2] = math.nan
    logits[4:, 1:40] = -math.inf
    rows = [row(temperature=temperature, top_k=k, seed=k) for k in (0, 1, 3, 50)] * 2
    assert all(token % 2 == 1 for token in ids(logits, rows))


def test_nan_does_not_outrank_minus_infinity() -> None:
    logits = torch.full((1, 5), -math.inf)
    logits[0, 0] = math.nan
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}):
        assert ids(logits, [row(**params)]) != [0]


@pytest.mark.parametrize(
    "params", [{"top_p": 0.8}, {"top_k": 6}, {"min_p": 0.15}, {"top_k": 9, "top_p": 0.7}]
)
def test_draws_follow_the_law(params: dict[str, Any]) -> None:
    """Pearson's chi-square stays below its mean plus six deviations."""
    count = 20_000
    line = normal(9, 30) * 1.3
    one = row(temperature=0.8, **params)
    rows = [row(temperature=0.8, seed=3, position=i, **params) for i in range(count)]
    seen = torch.bincount(torch.tensor(ids(line.expand(count, -1), rows)), minlength=30).double()
    want = torch.tensor(reference.law(line.tolist(), one.params)) * count
    assert seen[want == 0].sum() == 0
    want, seen = want[want > 0], seen[want > 0]
    assert want.numel() > 2
    assert want.min() > 5
    freedom = want.numel() - 1
    assert ((seen - want) ** 2 / want).sum() < freedom + 6 * math.sqrt(2 * freedom)
