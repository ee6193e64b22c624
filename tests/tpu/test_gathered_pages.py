"""The pages that a step takes, as a pool of their own."""

from __future__ import annotations

import pytest
import torch

from ml4core.api import Segment, StepPlan, StepShape
from ml4core_tpu.gathered_pages import GatheredPages, seen_pages

PAGE = 4
BLOCKS = 9


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture
def plan() -> StepPlan:
    """Two decodes at lengths 6 and 3, the first with a page that no row sees yet; a padded row."""
    none = Segment(0, 0, 0)
    return StepPlan(
        StepShape(Segment(2, 2, 1), none, none, (("latent", 3),), 2),
        token_ids=ints(1, 1, 0),
        positions=ints(5, 2, 0),
        row_request=ints(0, 1, 0),
        query_start=ints(0, 1, 2).int(),
        visible=ints(6, 3, 0).int(),
        block_tables={"latent": torch.tensor([[7, 2, 5], [3, 0, 0]]).int()},
        slots={"latent": ints(2 * PAGE + 1, 3 * PAGE + 2, -1)},
        logits_indices=ints(0, 1),
    )


def test_pages_are_those_that_rows_see(plan: StepPlan) -> None:
    assert seen_pages(plan, "latent", PAGE, BLOCKS).tolist() == [2, 3, 7]
    chosen = ints(8 * PAGE, -1, BLOCKS * PAGE, 2**31 - 1).view(2, 2)
    assert seen_pages(plan, "latent", PAGE, BLOCKS, [chosen]).tolist() == [2, 3, 7, 8]


def test_tables_and_slots_are_those_of_the_new_pool(plan: StepPlan) -> None:
    pages = GatheredPages.of(seen_pages(plan, "latent", PAGE, BLOCKS), 4, BLOCKS, PAGE)
    assert pages.size == 4
    assert pages.table(plan, "latent").tolist() == [[2, 0, 0], [1, 0, 0]]
    assert pages.slots(plan.slots["latent"]).tolist() == [1, PAGE + 2, -1]
    every = torch.tensor([*range(2 * PAGE, 4 * PAGE), *range(7 * PAGE, 8 * PAGE), -1]).int()
    assert torch.equal(pages.back(pages.slots(every)), every)
    for hostile in (BLOCKS * PAGE, 2**31 - 1, 4 * PAGE):  # beyond, far beyond, of another page
        assert pages.slots(ints(hostile)).item() >= pages.size * PAGE
    assert pages.slots(ints(-7)).item() == -7


def test_a_pool_that_is_too_small_grows() -> None:
    assert GatheredPages.of(ints(1, 2, 3, 5, 6), 4, BLOCKS, PAGE).size == 8


def test_only_pages_that_rows_lie_in_are_written(plan: StepPlan) -> None:
    pages = GatheredPages.of(seen_pages(plan, "latent", PAGE, BLOCKS), 4, BLOCKS, PAGE)
    held = torch.arange(BLOCKS * PAGE).view(BLOCKS, PAGE)
    (found,) = pages.parts([held])
    assert found[:3].tolist() == held[[2, 3, 7]].tolist()
    before = held.clone()
    pages.written(held, found + 100, plan.slots["latent"])
    changed = (held != before).all(1).nonzero().flatten()
    assert changed.tolist() == [2, 3]
    assert torch.equal(held[[2, 3]], before[[2, 3]] + 100)


def test_a_step_of_padding_takes_none(plan: StepPlan) -> None:
    """A rank without requests steps along."""
    none = GatheredPages.of(ints(), 4, BLOCKS, PAGE)
    held = torch.zeros(BLOCKS, PAGE)
    (found,) = none.parts([held])
    assert found.shape == (4, PAGE)
    padding = ints(-1, -1)
    assert none.slots(padding).tolist() == [-1, -1]
    assert none.back(padding).tolist() == [-1, -1]
    none.written(held, found + 1, padding)
    assert not held.any()
