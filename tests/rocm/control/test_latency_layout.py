"""Peers' memory and tags: no two things share a byte, and no tag comes twice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4core_rocm.latency.mailbox import LINE, PAIR, Mailbox
from ml4core_rocm.latency.tags import EMPTY, TAG_MAX, Tags, TagsUsedUp

boxes = st.builds(
    Mailbox, st.integers(2, 8), st.integers(1, 8), st.integers(1, 64).map(lambda half: 2 * half)
)


@given(boxes)
def test_regions_do_not_overlap(box: Mailbox) -> None:
    end = 0
    for region in box.regions:
        assert region.offset >= end
        assert region.offset % LINE == 0
        assert region.nbytes > 0
        end = region.end
    assert box.nbytes >= end
    assert len({region.id for region in box.regions}) == len(box.regions)


@given(boxes, st.integers(1, TAG_MAX))
def test_each_value_of_an_exchange_has_its_own_pair(box: Mailbox, tag: int) -> None:
    places = {
        box.partial_sum(tag, source, row, pair)
        for source in range(box.ranks)
        for row in range(box.rows)
        for pair in range(box.hidden // 2)
    }
    assert len(places) == box.ranks * box.rows * box.hidden // 2
    region = box.region(f"sum.{tag % 2}")
    assert min(places) == region.offset
    assert max(places) + PAIR == region.end
    assert all(place % PAIR == 0 for place in places)  # one aligned store
    ends = {box.end_mark(source) for source in range(box.ranks)}
    assert len(ends) == box.ranks
    assert not ends & places


def test_places_outside_are_refused() -> None:
    box = Mailbox(4, 2, 8)
    for at in ((4, 0, 0), (0, 2, 0), (0, 0, 4), (-1, 0, 0)):
        with pytest.raises(ValueError, match=r"of \(4, 2, 4\)"):
            box.partial_sum(1, *at)
    with pytest.raises(ValueError, match="source 4 of 4"):
        box.end_mark(4)
    with pytest.raises(KeyError, match=r"no region 'sum'; there are fault, record, end, sum\.0"):
        box.region("sum")
    with pytest.raises(ValueError, match="an even number of values"):
        Mailbox(4, 1, 7)


@given(
    sites=st.integers(1, 200),
    pairs=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 199)), min_size=2, max_size=40),
)
def test_tags_are_unique_and_never_empty(sites: int, pairs: list[tuple[int, int]]) -> None:
    tags = Tags(sites)
    asked = {(epoch, site % sites) for epoch, site in pairs}
    found = {tags.tag(*one) for one in asked}
    assert len(found) == len(asked)
    assert EMPTY not in found
    assert max(found) <= TAG_MAX


@given(st.integers(1, 10**6))
def test_the_last_tag_fits_and_none_comes_after(sites: int) -> None:
    tags = Tags(sites)
    last = tags.epochs - 1
    assert tags.tag(last, sites - 1) <= TAG_MAX
    with pytest.raises(TagsUsedUp, match="a reset"):
        tags.tag(last + 1, 0)
    assert tags.reset_due(last)
    assert tags.reset_due(tags.epochs - tags.margin)
    assert not tags.reset_due(tags.epochs - tags.margin - 1)
    assert tags.epochs > tags.margin + 1  # there is something to do before the first reset


def test_two_exchanges_a_layer_last_for_days() -> None:
    """Of 72 layers, at a step in 5 ms, before all ranks have to stop for a reset."""
    assert Tags(2 * 72 + 1).epochs * 0.005 > 1.5 * 86400


@given(st.integers(0, 2**31), st.integers(2, 4), st.integers(2, 5))
def test_no_store_overtakes_a_reader(seed: int, ranks: int, sites: int) -> None:
    """Any order in which ranks move: what a peer still has to read is never written over.

    A rank publishes to all, then needs all. The model keeps, for each pair of memory, the tag that
    lies there and whether its owner has read it.
    """
    box, tags = Mailbox(ranks, 1, 2), Tags(sites)
    draw = random.Random(seed)
    steps = [(epoch, site) for epoch in range(3) for site in range(sites)]
    published, done = [0] * ranks, [0] * ranks  # exchanges that each rank has published, finished
    lies: dict[tuple[int, int], tuple[int, int]] = {}  # (owner, offset) -> (exchange, source)

    def place(exchange: int, source: int) -> int:
        epoch, site = steps[exchange]
        if site == sites - 1:
            return box.end_mark(source)
        return box.partial_sum(tags.tag(epoch, site), source)

    while min(done) < len(steps):
        rank = draw.randrange(ranks)
        if done[rank] == len(steps):
            continue
        if published[rank] == done[rank]:
            for owner in range(ranks):
                at = (owner, place(published[rank], rank))
                if at in lies:
                    assert done[owner] > lies[at][0], (at, lies[at], published, done)
                lies[at] = (published[rank], rank)
            published[rank] += 1
        elif all(
            lies.get((rank, place(done[rank], source)), (-1, -1))[0] == done[rank]
            for source in range(ranks)
        ):
            done[rank] += 1
