"""Exact top-k: ties, infinities, NaN, and every relation of k, visible and S."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml4core.compose.ops import COMPOSED

from .references import top_positions
from .support import INF, NAN, Check, Draw, corner_cases

topk = COMPOSED["topk"]


def check_topk(scores: Tensor, visible: list[int], k: int) -> None:
    before = scores.clone()
    positions, lens, has_nan = topk(scores, torch.tensor(visible, dtype=torch.int32), k)
    assert torch.equal(scores.nan_to_num(7.5), before.nan_to_num(7.5))
    rows, columns = scores.shape
    assert positions.shape == (rows, k)
    assert positions.dtype == lens.dtype == torch.int32
    for t in range(rows):
        seen = min(visible[t], columns)
        want = top_positions(scores[t].tolist(), seen, k)
        assert positions[t].tolist() == want + [-1] * (k - len(want))
        assert lens[t].item() == len(want)
        assert has_nan[t].item() == bool(scores[t, :seen].isnan().any())


def few_values(seed: int, *shape: int) -> Tensor:
    """Many ties, both infinities and NaN."""
    values = torch.tensor([-INF, -1.5, -0.0, 0.0, 1e-45, 2.0, INF, NAN])
    return values[Draw(seed).integers(0, 8, *shape)]


@pytest.mark.parametrize("k", [1, 3, 64, 97, 130])
@pytest.mark.parametrize("columns", [1, 61, 97])
def test_topk(columns: int, k: int) -> None:
    draw = Draw(columns * 1000 + k)
    visible = draw.integers(0, columns + 20, 9).tolist()
    check_topk(draw.normal(9, columns), visible, k)
    check_topk(few_values(k, 9, columns), visible, k)
    check_topk(draw.normal(9, columns).round(), visible, k)


def test_long_rows() -> None:
    draw = Draw(1)
    check_topk(draw.normal(2, 20_011).round(decimals=2), [20_011, 17_003], 2048)


def test_tiles_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, visible = few_values(3, 13, 40), torch.full((13,), 40, dtype=torch.int32)
    whole = topk(scores, visible, 5)
    monkeypatch.setattr("ml4core.compose.ops.selection.tile_size", lambda count, size: 4)
    for got, want in zip(topk(scores, visible, 5), whole, strict=True):
        assert torch.equal(got, want)


def test_a_row_does_not_depend_on_its_batch() -> None:
    scores = few_values(4, 64, 50)
    visible = Draw(4).integers(0, 51, 64).to(torch.int32)
    whole = topk(scores, visible, 7)
    for rows in (slice(5, 6), slice(10, 17)):
        for got, want in zip(topk(scores[rows], visible[rows], 7), whole, strict=True):
            assert torch.equal(got, want[rows])


def test_one_score_a_third_of_them_nan() -> None:
    """B001."""
    draw = Draw(5)
    scores = draw.normal(2, 5000)
    scores[draw.uniform(2, 5000) < 0.3] = NAN
    scores[:, 100:103], scores[:, 200:203] = INF, -INF
    check_topk(scores, [5000, 1200], 2048)


def test_larger_scores_always_come_first() -> None:
    """B003: 100 larger ones among 6,000 equal ones."""
    scores = torch.zeros(1, 6100)
    larger = Draw(6).permutation(6100)[:100]
    scores[0, larger] = 1.0
    positions, _, _ = topk(scores, torch.tensor([6100]), 2048)
    assert set(larger.tolist()) <= set(positions[0].tolist())
    check_topk(scores, [6100], 2048)


def test_values_beyond_visible_are_not_looked_at() -> None:
    scores = Draw(7).normal(3, 40)
    visible = torch.tensor([0, 7, 33], dtype=torch.int32)
    want = topk(scores, visible, 9)
    for junk in (NAN, INF, -INF):
        dirty = scores.clone()
        for t, end in enumerate(visible.tolist()):
            dirty[t, end:] = junk
        for got, clean in zip(topk(dirty, visible, 9), want, strict=True):
            assert torch.equal(got, clean)


def ties_at_the_border() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, -0.0, 2.0, 0.0, 3.0]])
    for k in range(1, 9):
        check_topk(scores, [8], k)
    positions, _, _ = topk(scores, torch.tensor([8]), 3)
    assert positions.tolist() == [[1, 2, 7]]


def all_minus_infinity() -> None:
    check_topk(torch.full((2, 10), -INF), [10, 4], 6)


def nan_corner() -> None:
    check_topk(torch.full((1, 10), NAN), [10], 4)
    signs = torch.tensor([0x7FC00000, -1, 0x7F800001, 0], dtype=torch.int32).view(torch.float32)
    check_topk(signs[None], [4], 2)


CORNERS: dict[str, dict[str, Check]] = {
    "topk": {
        "fewer than k visible": lambda: check_topk(Draw(8).normal(2, 20), [5, 9], 10),
        "visible = k": lambda: check_topk(Draw(9).normal(2, 20), [10, 10], 10),
        "ties at the border": ties_at_the_border,
        "all -inf": all_minus_infinity,
        "NaN": nan_corner,
        "length 0": lambda: check_topk(Draw(10).normal(2, 20), [0, 0], 3),
        "k > S": lambda: check_topk(Draw(11).normal(2, 20), [20, 25], 30),
    }
}


@corner_cases(CORNERS)
def test_corners(check: Check) -> None:
    check()
