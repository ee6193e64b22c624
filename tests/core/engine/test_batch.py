"""Plans gathered from slots equal those that `build_plan` makes of sequences."""

from __future__ import annotations

import random

import pytest
import torch

from ml4core.api import StepBuckets, StepPlan
from ml4core.engine.batch import FIRST_SLOTS, BatchState, in_row_order
from ml4core.engine.request import Request
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import Work
from support.stepping import Sequence, build_plan

BLOCK = 4
GROUPS = ("latent", "index")


def assert_equal(ours: StepPlan, reference: StepPlan) -> None:
    assert ours.shape == reference.shape
    for name in (
        "token_ids",
        "positions",
        "row_request",
        "query_start",
        "visible",
        "logits_indices",
    ):
        mine, theirs = getattr(ours, name), getattr(reference, name)
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name
    for name in ("block_tables", "slots"):
        mine, theirs = getattr(ours, name), getattr(reference, name)
        assert mine.keys() == theirs.keys()
        for group in mine:
            assert mine[group].dtype == theirs[group].dtype, (name, group)
            assert torch.equal(mine[group], theirs[group]), (name, group)


def random_buckets(rng: random.Random) -> StepBuckets:
    def sizes(most: int) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(1, most), rng.choice([0, 1, 4]))))

    return StepBuckets(sizes(15), sizes(15), sizes(15), sizes(300), sizes(30), sizes(60))


class Batch:
    """Requests with random pages, some of them null in front, bound to slots."""

    def __init__(
        self,
        rng: random.Random,
        slots: int,
        buckets: StepBuckets = StepBuckets(),  # noqa: B008
    ) -> None:
        self.rng = rng
        self.buckets = buckets
        self.state = BatchState(slots, GROUPS, BLOCK, "cpu", buckets=buckets)
        self.next_page = {group: 1 for group in GROUPS}
        self.requests: list[Request] = []

    def add(self, tokens: int) -> None:
        ids = [self.rng.randrange(5000) for _ in range(tokens)]
        made = Request("r", ids, SamplingParams(), limit=10_000)
        made.num_computed = self.rng.randrange(tokens)
        self.grow(made, tokens + self.rng.randrange(20))
        if self.rng.random() < 0.3:
            self.pass_window(made)
        self.state.bind(made)
        self.requests.append(made)

    def pass_window(self, made: Request) -> None:
        passed = self.rng.randint(0, made.num_computed // BLOCK)
        for block in range(passed):
            made.pages["index"][block] = 0

    def grow(self, made: Request, tokens: int) -> None:
        for group in GROUPS:
            pages = made.pages.setdefault(group, [])
            while len(pages) * BLOCK < tokens:
                pages.append(self.next_page[group])
                self.next_page[group] += self.rng.randint(1, 3)

    def work(self, verify_rows: int) -> list[Work]:
        work = []
        for made in self.rng.sample(self.requests, self.rng.randint(1, len(self.requests))):
            left = made.num_tokens - made.num_computed
            choices = [1, self.rng.randint(1, left), min(left, verify_rows or 1)]
            start, rows = made.num_computed, self.rng.choice(choices)
            window = rows if rows == verify_rows else 0
            work.append(Work(made, start, start + rows, start + rows == made.num_tokens, 0, window))
        return work


@pytest.mark.parametrize("seed", range(40))
def test_random_mixes_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    batch = Batch(rng, 12, random_buckets(rng))
    for _ in range(12):
        if not batch.requests or (len(batch.requests) < 12 and rng.random() < 0.8):
            batch.add(rng.choice([1, 2, 5, 30, 1500]))
        if len(batch.requests) > 1 and rng.random() < 0.2:
            batch.state.unbind(batch.requests.pop(rng.randrange(len(batch.requests))))
        verify = rng.choice([0, 3])
        work = in_row_order(batch.work(verify))
        every = rng.random() < 0.3 or any(w.window for w in work)
        built = batch.state.build(work, every_row=range(len(work)) if every else ())
        sequences = [
            (Sequence(w.request.token_ids, 1, w.start, w.request.pages), w.rows) for w in work
        ]
        reference = build_plan(
            sequences,
            GROUPS,
            BLOCK,
            verify_rows=verify,
            all_logits=every,
            buckets=batch.buckets,
        )
        assert_equal(built.plan, reference)
        for i, w in enumerate(work):
            first, wanted = int(built.layout.rows[i]), reference.logits_indices.tolist()
            assert reference.positions[first] == w.start
            assert reference.row_request[first] == built.layout.requests[i]
            assert wanted[built.logits[i]] == (first if every else first + w.rows - 1)
        # A step: what was computed counts, drawn tokens come, pages grow, windows pass.
        alive = []
        for w in work:
            w.request.num_computed = w.end
            if w.draws:
                w.request.append(rng.randrange(5000))
                alive.append(w.request)
        batch.state.append(alive)
        for made in batch.requests:
            if rng.random() < 0.5:
                batch.grow(made, made.num_tokens + 9)
                batch.pass_window(made)
                batch.state.sync(made)
            else:
                batch.grow(made, made.num_tokens)
                batch.state.sync(made)


def test_slots_come_as_requests_do() -> None:
    """The largest `--max-num-seqs` takes no memory by itself; what is bound stays as it was."""
    batch = Batch(random.Random(1), slots=2**31 - 1)
    for count in range(2 * FIRST_SLOTS + 3):
        batch.add(9)
        if count == FIRST_SLOTS // 2:
            batch.state.unbind(batch.requests.pop(3))
    slots = [made.slot for made in batch.requests]
    assert sorted(slots) == list(range(2 * FIRST_SLOTS + 2))
    work = [Work(made, 0, 9, True, 0) for made in batch.requests]
    sequences = [(Sequence(w.request.token_ids, 1, 0, w.request.pages), 9) for w in work]
    reference = build_plan(sequences, GROUPS, BLOCK, buckets=batch.buckets)
    assert_equal(batch.state.build(work).plan, reference)


def test_no_more_slots_than_asked_for() -> None:
    batch = Batch(random.Random(2), slots=3)
    for _ in range(3):
        batch.add(2)
    with pytest.raises(IndexError):
        batch.add(2)


def test_logits_of_every_row_of_some_requests() -> None:
    batch = Batch(random.Random(3), slots=3)
    for _ in range(3):
        batch.add(9)
    rows = [1, 4, 3]
    work = [
        Work(made, 0, count, False, 0) for made, count in zip(batch.requests, rows, strict=True)
    ]
    ordered = in_row_order(work)
    assert [w.rows for w in ordered] == [1, 3, 4]
    plan, _, firsts = batch.state.build(ordered, every_row=[1])
    assert firsts.tolist() == [0, 1, 4]
    assert plan.logits_indices.tolist() == [0, 1, 2, 3, 7]
    assert plan.shape.logits == 5


def test_a_slot_that_is_used_again_shows_nothing_of_its_last_request() -> None:
    batch = Batch(random.Random(5), 1, StepBuckets(pages=(30,)))
    batch.add(60)
    batch.state.unbind(batch.requests.pop())
    batch.add(3)
    (made,) = batch.requests
    work = [Work(made, made.num_computed, made.num_tokens, True, 0)]
    plan = batch.state.build(work).plan
    pages = made.pages["latent"]
    assert plan.block_tables["latent"].tolist() == [pages + [0] * (30 - len(pages))]
