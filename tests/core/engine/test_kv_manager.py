"""Pages over several groups: hits, windows, salts, and a machine of random use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ml4core.engine.block_hash import ROOT, hash_block
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.kv_groups import KVGroup, size_groups
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.request import Request
from ml4core.engine.sampling_params import SamplingParams

BLOCK = 4
FULL = KVGroup("latent")
WINDOW = KVGroup("window", window=9)
DRAFT = KVGroup("draft", window=9, required=False)


def manager(*groups: KVGroup, blocks: int = 40, step_rows: int = 16, **options: Any) -> KVManager:
    pools = {group.name: BlockPool(group.name, blocks) for group in groups}
    return KVManager(groups, pools, BLOCK, step_rows=step_rows, **({"caching": True} | options))


def request(tokens: int, salt: str | None = None, first: int = 0, **fields: Any) -> Request:
    ids = list(range(first, first + tokens))
    return Request("r", ids, SamplingParams(), limit=1000, cache_salt=salt, **fields)


def compute(kv: KVManager, made: Request, rows: int | None = None) -> bool:
    """Allocates and confirms the next rows, all of them by default."""
    hit = kv.find_hit(made) if not made.pages else None
    done = hit.tokens if hit is not None else made.num_confirmed
    rows = made.num_tokens - done if rows is None else rows
    if not (kv.allocate(made, rows, hit) if hit is not None else kv.allocate(made, rows)):
        return False
    made.num_computed = made.num_confirmed = done + rows
    kv.cache(made)
    return True


def end(kv: KVManager, made: Request) -> None:
    kv.free(made)
    made.num_computed = made.num_confirmed = 0


def test_names_of_blocks_tell_apart_all_that_counts() -> None:
    base = hash_block(ROOT, [1, 2, 3, 4])
    others = [
        hash_block(base, [1, 2, 3, 4]),
        hash_block(ROOT, [1, 2, 3, 5]),
        hash_block(ROOT, [1, 2, 3, 4], [b""]),
        hash_block(ROOT, [1, 2, 3, 4], [b"a"]),
        hash_block(ROOT, [1, 2, 3, 4], [b"a", b""]),
        hash_block(ROOT, [1, 2, 3], [(4).to_bytes(8, "little")]),
    ]
    assert len({base, *others}) == 7
    assert hash_block(ROOT, (1, 2, 3, 4)) == base


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 16, 17])
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(tokens: int) -> None:
    kv = manager(FULL)
    first = request(tokens)
    assert compute(kv, first)
    assert kv.find_hit(request(tokens)).tokens == (tokens - 1) // BLOCK * BLOCK
    end(kv, first)
    hit = kv.find_hit(request(tokens))
    assert hit.tokens == (tokens - 1) // BLOCK * BLOCK, "also after the pages were given back"
    second = request(tokens)
    assert compute(kv, second)
    assert second.pages["latent"][: len(hit.pages.get("latent", []))] == hit.pages.get("latent", [])


def test_only_confirmed_tokens_are_found() -> None:
    kv = manager(FULL)
    made = request(12)
    assert kv.allocate(made, 12)
    made.num_computed = 12
    kv.cache(made)
    assert kv.find_hit(request(12)).tokens == 0
    made.num_confirmed = 7
    kv.cache(made)
    assert kv.find_hit(request(12)).tokens == 4


def test_the_start_of_a_prefix_is_kept_longest() -> None:
    kv = manager(FULL, blocks=6)
    made = request(21)
    assert not compute(kv, made)
    made = request(17)
    assert compute(kv, made)
    end(kv, made)
    found = []
    for _ in range(5):
        found.append(kv.find_hit(request(17)).tokens)
        kv.pools["latent"].allocate(1)
    assert found == [16, 16, 12, 8, 4], "the page without a hash goes first, then the last block"


def test_a_salt_keeps_prefixes_apart() -> None:
    """B056."""
    kv = manager(FULL)
    compute(kv, request(20, "a"))
    assert kv.find_hit(request(20, "a")).tokens == 16
    for salt in ("b", "", None):
        assert kv.find_hit(request(20, salt)).tokens == 0


def test_all_groups_or_none() -> None:
    pools = {"latent": BlockPool("latent", 20), "index": BlockPool("index", 4)}
    kv = KVManager([FULL, KVGroup("index")], pools, BLOCK, step_rows=16, caching=True)
    made = request(16)
    assert not kv.allocate(made, 16)
    assert made.pages == {}
    assert [pool.used_pages for pool in pools.values()] == [0, 0]
    assert kv.allocate(made, 12)
    assert kv.usage() == {"latent": 3 / 19, "index": 1.0}


def test_pages_of_a_hit_that_are_free_do_not_count_twice() -> None:
    kv = manager(FULL, blocks=5)
    first = request(12)
    compute(kv, first)
    end(kv, first)
    second = request(20)
    assert kv.find_hit(second).tokens == 12
    assert not kv.allocate(second, 8, kv.find_hit(second)), "5 pages are wanted, there are 4"
    assert kv.allocate(second, 4, kv.find_hit(second))


def test_a_window_gives_back_what_no_row_to_come_can_see() -> None:
    kv = manager(FULL, WINDOW)
    made = request(100)
    for done in range(4, 100, 4):
        assert compute(kv, made, 4)
        pages = made.pages["window"]
        # Dropped when the rows before this call's were the last: key j is seen from row q if
        # q - j < 9.
        first = max(0, done - 4 - 9 + 1) // BLOCK
        assert pages[:first] == [0] * first
        assert all(pages[first:])
        assert len(pages) == len(made.pages["latent"]) == done // BLOCK
    held = sum(1 for page in made.pages["window"] if page)
    assert held <= WINDOW.pages_for(100, BLOCK, 4) == 4
    end(kv, made)
    assert all(pool.used_pages == 0 for pool in kv.pools.values())


def test_a_window_counts_from_what_is_confirmed() -> None:
    """A step in flight still reads what its rows see."""
    kv = manager(FULL, WINDOW)
    made = request(100)
    for done in range(8, 40, 4):
        assert kv.allocate(made, 4)
        made.num_computed += 4
        made.num_confirmed = max(0, made.num_computed - 8)
        first = max(0, max(0, made.num_computed - 12) - 9 + 1) // BLOCK
        assert all(made.pages["window"][first:]), done


def test_a_hit_needs_the_last_window_and_no_more() -> None:
    kv = manager(FULL, WINDOW)
    made = request(41)
    assert compute(kv, made)
    assert kv.allocate(made, 1), "gives back what has passed"
    end(kv, made)
    hit = kv.find_hit(request(41))
    assert hit.tokens == 40
    assert hit.pages["window"][:8] == [0] * 8
    assert all(hit.pages["window"][8:])
    assert hit.key_start == {}
    # Once a page of that window is used again, the prefix is shorter.
    last = hit.pages["window"][-1]
    pool = kv.pools["window"]
    taken = pool.allocate(pool.free_pages)
    pool.release([page for page in taken if page != last])
    assert kv.find_hit(request(41)).tokens == 0


def test_groups_agree_on_a_length_that_all_of_them_have() -> None:
    """The longest prefix of one group may end where another has a hole."""
    kv = manager(FULL, WINDOW, KVGroup("wide", window=17))
    made = request(41)
    assert compute(kv, made)
    hashes = made.hashes(10, BLOCK)
    end(kv, made)

    # Two blocks are a window of "window", four of "wide".
    for name in ("window", "wide"):
        pool = kv.pools[name]
        for block in range(10):
            page = pool.lookup(hashes[block])
            pool.touch([page])
    keep = {"window": {0, 1, 2, 3, 4, 5, 8, 9}, "wide": {0, 1, 2, 3, 4, 5, 6, 7}}
    for name, blocks in keep.items():
        pool = kv.pools[name]
        for block in set(range(10)) - blocks:
            page = pool.lookup(hashes[block])
            pool.release([page])
            taken = pool.allocate(pool.free_pages)
            pool.release(taken)
    # latent: 10; window: 10 (8, 9); wide: 8; window: 6 (4, 5); wide: 6 (2 to 5).
    assert kv.find_hit(request(41)).tokens == 24


def test_a_drafter_without_its_window_shortens_no_hit() -> None:
    """B050."""
    kv = manager(FULL, DRAFT)
    made = request(41)
    assert compute(kv, made)
    end(kv, made)
    whole = kv.find_hit(request(41))
    assert (whole.tokens, whole.key_start) == (40, {})
    pool = kv.pools["draft"]
    pool.release(pool.allocate(pool.free_pages))
    hit = kv.find_hit(request(41))
    assert hit.tokens == 40
    assert hit.pages["draft"] == [0] * 10
    assert hit.key_start == {"draft": 40}
    again = request(41)
    assert compute(kv, again)
    assert again.key_start == {"draft": 40}
    kv.count(again, hit)
    assert (kv.counts["latent"].hits, kv.counts["draft"].hits) == (40, 0)
    end(kv, again)
    # What was computed behind the hole does not make the window whole.
    assert kv.find_hit(request(41)).key_start == {"draft": 40}
    # A window of the model itself is needed.
    kv = manager(FULL, WINDOW)
    assert compute(kv, made)
    end(kv, made)
    pool = kv.pools["window"]
    pool.release(pool.allocate(pool.free_pages))
    assert kv.find_hit(request(41)).tokens == 0


def test_reset_waits_for_the_pages_to_come_back() -> None:
    kv = manager(FULL)
    made = request(20)
    compute(kv, made)
    assert not kv.reset_prefix_cache()
    assert kv.find_hit(request(20)).tokens == 16
    end(kv, made)
    assert kv.reset_prefix_cache()
    assert kv.find_hit(request(20)).tokens == 0


def test_without_caching_nothing_is_found() -> None:
    kv = manager(FULL, caching=False)
    made = request(20)
    compute(kv, made)
    end(kv, made)
    assert kv.find_hit(request(20)).tokens == 0
    assert kv.counts["latent"].queries == 0


def test_windowed_groups_are_sized_first() -> None:
    groups = [
        KVGroup("latent", page_bytes=3000),
        KVGroup("index", page_bytes=1000),
        KVGroup("draft", window=9, page_bytes=100),
    ]
    sizes = size_groups(groups, 1_000_000, BLOCK, max_num_seqs=8, max_model_len=1000, step_rows=16)
    assert sizes["draft"] == 7 * 8 + 1
    assert sizes["latent"] == sizes["index"] == (1_000_000 - 5700) // 4000
    with pytest.raises(ValueError, match="at least 8000 are needed"):
        size_groups(groups, 10_000, BLOCK, max_num_seqs=8, max_model_len=1000, step_rows=16)


class ManagerMachine(RuleBasedStateMachine):
    """Requests with few distinct prefixes come, grow by steps, end. No page is shared but by equal
    prefixes, and what a hit gives was computed from the same tokens.
    """

    alive = Bundle("alive")

    def __init__(self) -> None:
        super().__init__()
        self.kv = manager(FULL, WINDOW, DRAFT, blocks=30, step_rows=8)
        self.running: list[Request] = []
        # What each page was last written with: the tokens up to the end of the block.
        self.written: dict[tuple[str, int], tuple[Any, ...]] = {}

    @rule(
        target=alive,
        shared=st.integers(0, 4),
        kind=st.integers(0, 2),
        own=st.integers(1, 12),
        salt=st.sampled_from([None, "a"]),
    )
    def start(self, shared: int, kind: int, own: int, salt: str | None) -> Request:
        ids = [kind] * (shared * 3) + [7] * own
        return Request("r", ids, SamplingParams(), limit=1000, cache_salt=salt)

    @rule(made=alive, rows=st.integers(1, 8))
    def step(self, made: Request, rows: int) -> None:
        fresh = not made.pages
        if fresh:
            hit = self.kv.find_hit(made)
            for group, pages in hit.pages.items():
                for block, page in enumerate(pages):
                    if page:
                        assert self.written[group, page] == self.content(made, block)
            rows = min(rows, made.num_tokens - hit.tokens)
            if not self.kv.allocate(made, rows, hit):
                assert made.pages == {}
                return
            self.running.append(made)
            made.num_computed = made.num_confirmed = hit.tokens
        else:
            if made.num_confirmed == made.num_tokens:
                made.append(made.num_tokens % 3)
            rows = min(rows, made.num_tokens - made.num_confirmed)
            if not self.kv.allocate(made, rows):
                return
        start, stop = made.num_confirmed, made.num_confirmed + rows
        assert made.capacity >= stop
        for group in ("latent", "window", "draft"):
            for block in range(start // BLOCK, -(-stop // BLOCK)):
                page = made.pages[group][block]
                assert page
                assert self.kv.pools[group].refs(page) == 1, "written while another reads it"
                self.written[group, page] = self.content(made, block, stop)
        made.num_computed = made.num_confirmed = stop
        self.kv.cache(made)

    @rule(made=consumes(alive))
    def finish(self, made: Request) -> None:
        if made in self.running:
            self.running.remove(made)
        end(self.kv, made)

    def content(self, made: Request, block: int, stop: int | None = None) -> tuple[Any, ...]:
        last = (block + 1) * BLOCK
        return (made.cache_salt, *made.token_ids[: last if stop is None else min(stop, last)])

    @invariant()
    def references_are_those_of_the_running(self) -> None:
        for group, pool in self.kv.pools.items():
            refs = [0] * pool.blocks
            for made in self.running:
                for page in made.pages[group]:
                    refs[page] += page > 0
            assert refs == [pool.refs(page) for page in range(pool.blocks)]
            assert pool.used_pages == sum(1 for count in refs if count)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
