"""Drawing tokens: greedy ties, the law at a temperature, and noise that ignores the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ml4core.compose.ops import COMPOSED, noise, sampling

from .references import noise_words
from .support import INF, NAN, Check, Draw, corner_cases

sample = COMPOSED["sample"]


def greedy(logits: Tensor) -> list[int]:
    rows = logits.shape[0]
    counts = torch.arange(rows)
    ids: list[int] = sample(logits, torch.zeros(rows), counts, counts).tolist()
    return ids


def draws(logits: Tensor, temperature: float, count: int, seed: int = 0) -> Tensor:
    """Draws from one row of logits at positions 0, 1, ..."""
    return sample(
        logits.expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), seed),
        torch.arange(count),
    )


def check_law(ids: Tensor, odds: Tensor) -> None:
    """Pearson's chi-square stays below its mean plus six deviations."""
    seen = torch.bincount(ids, minlength=odds.numel()).double()
    assert seen[odds == 0].sum() == 0
    expected = odds[odds > 0].double() * ids.numel()
    assert expected.min() > 5
    statistic = ((seen[odds > 0] - expected).pow(2) / expected).sum().item()
    freedom = expected.numel() - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_law_of_one_row_over_positions(temperature: float) -> None:
    logits = Draw(1).normal(40) * 0.5
    check_law(draws(logits, temperature, 40_000), torch.softmax(logits / temperature, -1))


def test_the_law_over_seeds() -> None:
    logits, count = Draw(2).normal(40), 40_000
    seeds = torch.arange(count) * 7919 - 2**62
    ids = sample(logits.expand(count, -1), torch.ones(count), seeds, torch.full((count,), 5))
    check_law(ids, torch.softmax(logits, -1))


def test_consecutive_draws_are_independent() -> None:
    logits = torch.tensor([0.0, 0.5, -0.5])
    ids = draws(logits, 1.0, 60_001)
    odds = torch.softmax(logits, -1)
    check_law(ids[:-1] * 3 + ids[1:], torch.outer(odds, odds).flatten())


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_noise_is_splitmix64(seed: int) -> None:
    for position in (0, 1, 2**20):
        for purpose in (noise.DRAW, noise.ACCEPT, noise.RESIDUAL):
            words = noise_words(seed, position, purpose, 9)
            want = [min((w >> 32) + 0.5, 2.0**32) / 2**32 for w in words]
            keys = noise.row_keys(torch.tensor([seed]), torch.tensor([position]), purpose)
            got = noise.uniform(keys, 9)[0]
            torch.testing.assert_close(got.double(), torch.tensor(want).double(), rtol=1e-7, atol=0)
            gumbel = [-math.log(-math.log1p(-u)) for u in want]
            torch.testing.assert_close(
                noise.gumbel(keys, 9)[0].double(),
                torch.tensor(gumbel).double(),
                rtol=1e-5,
                atol=1e-5,
            )


def test_noise_stays_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the largest word."""
    words = torch.tensor([[0, -1]])
    monkeypatch.setattr(noise, "_mix", lambda x: words)
    values = noise.uniform(torch.tensor([0]), 2)
    assert (values > 0).all()
    assert (values < 1).all()
    assert torch.isfinite(noise.gumbel(torch.tensor([0]), 2)).all()


def test_a_mask_is_never_overruled() -> None:
    """Only one token is left: it comes, at every temperature and position."""
    logits = torch.full((3000, 50), -INF)
    logits[:, 17] = -1e30
    for temperature in (1e-30, 0.1, 1.0, 1e30):
        ids = sample(
            logits, torch.full((3000,), temperature), torch.zeros(3000).long(), torch.arange(3000)
        )
        assert (ids == 17).all()


@pytest.mark.parametrize("temperature", [1e-38, 1e-10, 1e-3])
def test_small_temperatures_tend_to_greedy(temperature: float) -> None:
    logits = Draw(3).normal(200, 30) * 100
    ids = sample(
        logits, torch.full((200,), temperature), torch.zeros(200).long(), torch.arange(200)
    )
    assert ids.tolist() == logits.argmax(-1).tolist()


def test_temperature_zero_is_the_argmax() -> None:
    logits = Draw(4).normal(20, 300)
    assert greedy(logits) == [max(range(300), key=row.__getitem__) for row in logits.tolist()]
    assert greedy(logits.bfloat16()) == greedy(logits.bfloat16().float())


def test_nan_never_wins() -> None:
    rows = [[NAN, 1.0, 2.0, NAN], [NAN, -INF, NAN, -INF], [3.0, NAN, INF, INF]]
    logits = torch.tensor(rows)
    assert greedy(logits) == [2, 1, 2]
    assert set(draws(logits[0], 1.0, 300).tolist()) == {1, 2}
    assert set(draws(logits[2], 1.0, 300).tolist()) == {2, 3}
    all_nan = torch.full((1, 4), NAN)
    assert 0 <= greedy(all_nan)[0] < 4
    assert 0 <= draws(all_nan[0], 1.0, 1)[0] < 4


def tie() -> None:
    """The lowest id, at every place of the row."""
    for first in (0, 5, 31, 63):
        logits = torch.zeros(1, 64)
        logits[0, first:] = 2.0
        assert greedy(logits) == [first]
    assert greedy(torch.tensor([[-0.0, 0.0], [0.0, -0.0]])) == [0, 0]


def minus_infinity() -> None:
    logits = torch.tensor([-INF, 0.3, -INF, 0.1, 0.2])
    odds = torch.softmax(logits, -1)
    check_law(draws(logits, 1.0, 5000), odds)
    assert greedy(torch.full((1, 5), -INF)) == [0]
    assert draws(torch.full((5,), -INF), 1.0, 20).unique().tolist() == [0]


def other_batch() -> None:
    draw = Draw(5)
    logits, seeds = draw.normal(50, 100), draw.integers(-(2**62), 2**62, 50)
    positions = draw.integers(0, 2**20, 50)
    temperature = draw.uniform(50) * 2
    temperature[::7] = 0
    whole = sample(logits, temperature, seeds, positions)
    order = draw.permutation(50)[:13]
    some = sample(logits[order], temperature[order], seeds[order], positions[order])
    assert torch.equal(some, whole[order])


def test_tiles_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "tile_size", lambda count, each: 7)
    other_batch()


CORNERS: dict[str, dict[str, Check]] = {
    "sample": {
        "temperature 0": test_temperature_zero_is_the_argmax,
        "tie": tie,
        "-inf logits": minus_infinity,
        "same seed, other batch": other_batch,
    }
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
