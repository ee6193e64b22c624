"""Step plans: row order, padding, slots; and the page pools under them."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4core.engine.block_pool import BlockPool, PoolExhausted
from support.stepping import Sequence, build_plan

BLOCK = 4
GROUPS = ("latent", "index")


def sequences(
    lengths: list[int], computed: list[int]
) -> tuple[list[Sequence], dict[str, BlockPool]]:
    pools = {"latent": BlockPool("latent", 200), "index": BlockPool("index", 300)}
    pools["index"].allocate(7)  # the groups' ids differ
    made = []
    for length, done in zip(lengths, computed, strict=True):
        sequence = Sequence(list(range(100, 100 + length)), length, done)
        sequence.grow(pools, length, BLOCK)
        made.append(sequence)
    return made, pools


def test_rows_stand_as_decodes_then_windows_then_chunks_shortest_first() -> None:
    made, _ = sequences([9, 20, 8, 12, 6], [8, 5, 5, 4, 5])
    rows = [1, 15, 3, 8, 1]
    plan = build_plan(list(zip(made, rows, strict=True)), GROUPS, BLOCK, verify_rows=3)
    shape = plan.shape
    assert (shape.decode.requests, shape.decode.rows) == (2, 2)
    assert (shape.verify.requests, shape.verify.rows, shape.verify.max_rows) == (1, 3, 3)
    assert (shape.prefill.requests, shape.prefill.rows, shape.prefill.max_rows) == (2, 23, 15)
    assert shape.kind == "mixed"
    assert plan.positions.tolist() == [8, 5, 5, 6, 7, *range(4, 12), *range(5, 20)]
    assert plan.token_ids.tolist() == [100 + p for p in plan.positions.tolist()]
    assert plan.query_start.tolist() == [0, 1, 2, 5, 13, 28]
    assert plan.logits_indices.tolist() == [0, 1, 4, 12, 27]
    assert plan.visible.tolist() == [p + 1 for p in plan.positions.tolist()]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_slots_point_into_the_pages_of_their_sequence(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    computed = [data.draw(st.integers(0, n - 1)) for n in lengths]
    rows = [data.draw(st.integers(1, n - done)) for n, done in zip(lengths, computed, strict=True)]
    pad = data.draw(st.integers(0, 9))
    made, _ = sequences(lengths, computed)
    plan = build_plan(
        list(zip(made, rows, strict=True)),
        GROUPS,
        BLOCK,
        pad_requests=pad,
        pad_rows=pad * 3,
        pad_pages=pad,
    )
    owner = plan.row_request.tolist()
    for group in GROUPS:
        real = []
        for row, slot in enumerate(plan.slots[group].tolist()):
            if plan.visible[row] == 0:
                assert slot == -1
                continue
            position = int(plan.positions[row])
            page = int(plan.block_tables[group][owner[row], position // BLOCK])
            assert page > 0
            assert slot == page * BLOCK + position % BLOCK
            real.append(slot)
        assert len(set(real)) == len(real) == sum(rows)
    assert plan.shape.rows == len(plan.token_ids) == len(plan.slots["latent"])
    assert plan.shape.requests == len(plan.query_start) - 1 == len(plan.block_tables["latent"])
    # Steps of one kind of rows have logits of padded requests too, behind those of real ones.
    assert plan.shape.logits == len(plan.logits_indices) >= len(lengths)
    told = plan.logits_indices[: len(lengths)].tolist()
    assert len({owner[row] for row in told}) == len(lengths)
    assert all(plan.visible[row] > 0 for row in told)
    # Decode and verify requests, padded ones too, tile their segment without a gap.
    fixed = plan.shape.decode.requests
    assert plan.query_start[: fixed + 1].tolist() == list(range(fixed + 1))


def test_tables_have_the_pages_that_hold_keys_and_no_more() -> None:
    """Ops read each page of a table; pages kept for tokens to come cost nothing."""
    made, pools = sequences([9, 20], [8, 2])
    for sequence in made:
        sequence.grow(pools, 100, BLOCK)
    plan = build_plan([(made[0], 1), (made[1], 3)], GROUPS, BLOCK)
    assert plan.shape.pages == (("latent", 3), ("index", 3))
    for group in GROUPS:
        assert plan.block_tables[group].tolist() == [s.pages[group][:3] for s in made]
    wide = build_plan([(made[0], 1), (made[1], 3)], GROUPS, BLOCK, pad_pages=5)
    assert wide.block_tables["latent"].shape == (2, 5)


def test_padded_decodes_hold_padded_rows_and_padded_chunks_none() -> None:
    made, _ = sequences([5, 6], [4, 5])
    decode = build_plan([(s, 1) for s in made], GROUPS, BLOCK, pad_requests=4)
    assert decode.query_start.tolist() == [0, 1, 2, 3, 4]
    assert decode.visible.tolist() == [5, 6, 0, 0]
    assert decode.block_tables["latent"][2:].eq(0).all()
    made, _ = sequences([5, 6], [0, 0])
    chunk = build_plan([(made[0], 5), (made[1], 6)], GROUPS, BLOCK, pad_requests=3, pad_rows=16)
    assert chunk.query_start.tolist() == [0, 5, 11, 11]
    assert chunk.visible.tolist()[11:] == [0] * 5


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        build_plan([], GROUPS, BLOCK)


@pytest.mark.parametrize(("done", "rows"), [(0, 0), (2, -1), (0, 6), (4, 2), (5, 1)])
def test_rows_without_tokens_are_refused(done: int, rows: int) -> None:
    """They would give another sequence's logits, or rows of unequal counts."""
    made, _ = sequences([5, 7], [done, 0])
    with pytest.raises(ValueError, match=rf"{rows} rows of a sequence of 5 tokens, {done} of"):
        build_plan([(made[0], rows), (made[1], 7)], GROUPS, BLOCK)


def test_rows_without_pages_are_refused() -> None:
    """They would be written to the null page."""
    made, pools = sequences([5, 20], [0, 0])
    made[0].token_ids += [1] * 4
    build_plan([(made[0], 8), (made[1], 20)], GROUPS, BLOCK)  # the last page is full
    with pytest.raises(ValueError, match=r"ends at token 9 of .* whose latent pages hold 8 tokens"):
        build_plan([(made[0], 9), (made[1], 20)], GROUPS, BLOCK)
    made[0].pages["latent"] += pools["latent"].allocate(1)
    with pytest.raises(ValueError, match="whose index pages hold 8 tokens"):
        build_plan([(made[0], 9), (made[1], 20)], GROUPS, BLOCK)


def test_all_logits_names_every_real_row() -> None:
    made, _ = sequences([6, 3], [0, 2])
    plan = build_plan([(made[0], 6), (made[1], 1)], GROUPS, BLOCK, pad_rows=9, all_logits=True)
    assert plan.logits_indices.tolist() == list(range(7))


def test_a_pool_never_hands_out_the_null_page_and_takes_nothing_when_short() -> None:
    pool = BlockPool("latent", 6)
    pages = pool.allocate(5)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    with pytest.raises(PoolExhausted, match="latent pool has 0 free pages, 1 are wanted"):
        pool.allocate(1)
    pool.release(pages)
    assert pool.free_pages == 5


def test_growth_that_fails_in_one_group_gives_back_what_it_took_in_the_other() -> None:
    pools = {"latent": BlockPool("latent", 10), "index": BlockPool("index", 3)}
    sequence = Sequence([1] * 12, 12)
    with pytest.raises(PoolExhausted):
        sequence.grow(pools, 12, BLOCK)
    assert pools["latent"].free_pages == 9
    assert pools["index"].free_pages == 2
    assert sequence.pages == {}


def test_random_growth_and_release_leaks_no_page() -> None:
    rng = random.Random(7)
    pools = {"latent": BlockPool("latent", 40), "index": BlockPool("index", 30)}
    alive: list[Sequence] = []
    for _ in range(1000):
        if alive and rng.random() < 0.4:
            alive.pop(rng.randrange(len(alive))).release(pools)
            continue
        sequence = Sequence([0] * rng.randint(1, 40), 1)
        try:
            sequence.grow(pools, len(sequence.token_ids), BLOCK)
        except PoolExhausted:
            continue
        alive.append(sequence)
        held = [p for s in alive for p in s.pages["latent"]]
        assert len(set(held)) == len(held)
    for sequence in alive:
        sequence.release(pools)
    assert {g: p.free_pages for g, p in pools.items()} == {"latent": 39, "index": 29}


def test_slots_are_64_bit() -> None:
    made, _ = sequences([3], [0])
    plan = build_plan([(made[0], 3)], GROUPS, BLOCK)
    assert plan.slots["latent"].dtype == plan.positions.dtype == torch.int64
    assert plan.block_tables["latent"].dtype == plan.visible.dtype == torch.int32
