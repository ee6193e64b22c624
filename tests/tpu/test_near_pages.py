"""Windows over tables of their own pages see what they saw over whole ones."""

from __future__ import annotations

import pytest
import torch

from ml4core_tpu.near_pages import Paged, near_pages

PAGE = 4


def seen(paged: Paged, window: int) -> list[list[int]]:
    """The slots that each row sees."""
    table, start, visible = (one.tolist() for one in paged)
    found = []
    for request in range(len(table)):
        for row in range(start[request], start[request + 1]):
            keys = range(max(0, visible[row] - window), visible[row])
            found.append([table[request][key // PAGE] * PAGE + key % PAGE for key in keys])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_rows_see_the_same_keys(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    requests, columns, depth = 5, 12, 3
    table = torch.randperm(requests * columns, generator=draw).view(requests, columns).int()
    start = torch.arange(0, requests * depth + 1, depth).int()
    ends = torch.randint(0, columns * PAGE - depth, (requests, 1), generator=draw)
    visible = torch.where(ends > 0, ends + torch.arange(depth), 0).flatten().int()
    given = Paged(table, start, visible)
    window = int(torch.randint(1, 20, (1,), generator=draw))
    found = near_pages(given, window, PAGE, depth, columns)
    assert found.table.shape[1] == min(columns, 1 - (-(window + depth) // PAGE))
    assert seen(found, window) == seen(given, window)


def test_the_width_follows_from_the_window_alone() -> None:
    start, visible = torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    for columns in (1, 3, 50):
        given = Paged(torch.ones(1, columns).int(), start, visible)
        assert near_pages(given, 8, PAGE, 1, 64).table.shape == (1, 4)
        assert near_pages(given, 8, PAGE, 1, 2).table.shape == (1, 2)


def test_rows_too_far_apart_keep_the_whole_table() -> None:
    given = Paged(
        torch.arange(10).int().view(1, 10), torch.tensor([0, 2]).int(), torch.tensor([3, 39]).int()
    )
    found = near_pages(given, 4, PAGE, 2, 10)
    assert found.table.shape == (1, 16)
    assert torch.equal(found.visible, given.visible)
    assert near_pages(given, None, PAGE, 2, 10).table.shape == (1, 16)


def test_a_step_of_padding() -> None:
    none = torch.zeros(0).int()
    given = Paged(torch.zeros(2, 3).int(), torch.zeros(3).int(), none)
    assert near_pages(given, 4, PAGE, 1, 10).table.tolist() == [[0] * 3] * 2
