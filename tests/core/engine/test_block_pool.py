"""The page pool: order of reuse, references, and a machine of random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ml4core.engine.block_pool import NULL_PAGE, BlockPool, PoolExhausted


def name(number: int) -> bytes:
    return number.to_bytes(4, "little")


def test_pages_without_a_hash_are_used_again_first_and_those_with_one_in_order_of_release() -> None:
    pool = BlockPool("latent", 7)
    a, b, c, d = pool.allocate(4)
    pool.insert(a, name(1))
    pool.insert(c, name(3))
    pool.release([d, c, b, a])  # as a request does: the last page first
    assert pool.allocate(6) == [b, d, 5, 6, c, a]


def test_a_cached_page_is_found_until_its_place_is_taken() -> None:
    pool = BlockPool("latent", 3)
    (page,) = pool.allocate(1)
    pool.insert(page, name(1))
    pool.release([page])
    assert pool.lookup(name(1)) == page
    pool.touch([page])
    assert (pool.refs(page), pool.free_pages) == (1, 1)
    pool.touch([page, NULL_PAGE])
    pool.release([page])
    assert (pool.refs(page), pool.free_pages) == (1, 1)
    pool.release([page])
    pool.allocate(1)
    assert pool.lookup(name(1)) == page, "the free page without a hash goes first"
    pool.allocate(1)
    assert pool.lookup(name(1)) is None


def test_of_two_pages_with_one_content_the_first_is_found() -> None:
    pool = BlockPool("latent", 4)
    a, b = pool.allocate(2)
    pool.insert(a, name(1))
    pool.insert(b, name(1))
    assert (pool.lookup(name(1)), pool.cached_pages) == (a, 1)
    pool.release([b, a])
    assert pool.allocate(1) == [b], "the second one holds nothing that can be found"


def test_misuse_is_told() -> None:
    pool = BlockPool("latent", 3)
    with pytest.raises(ValueError, match="page 1 of the latent pool is not held"):
        pool.release([1])
    with pytest.raises(ValueError, match="not held"):
        pool.insert(1, name(1))
    with pytest.raises(PoolExhausted, match="latent pool has 2 free pages, 3 are wanted"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="at least 2 pages"):
        BlockPool("latent", 1)


class PoolMachine(RuleBasedStateMachine):
    """Random use against a plain model: references, contents, and the order of the free list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool("latent", 9)
        self.refs: dict[int, int] = {}
        self.content: dict[int, bytes] = {}
        self.free = list(range(1, 9))

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count)
            return
        taken, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == taken
        for page in taken:
            self.content.pop(page, None)
            self.refs[page] = 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.release([page])
        self.refs[page] -= 1
        if not self.refs[page]:
            del self.refs[page]
            self.free.insert(len(self.free) if page in self.content else 0, page)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.touch([page])
        self.refs[page] = self.refs.get(page, 0) + 1
        if page in self.free:
            self.free.remove(page)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), number=st.integers(0, 5))
    def insert(self, data: st.DataObject, number: int) -> None:
        page = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.insert(page, name(number))
        if page not in self.content and name(number) not in self.content.values():
            self.content[page] = name(number)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.content.clear()

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_pages == len(self.free)
        assert self.pool.cached_pages == len(self.content)
        for page in range(1, 9):
            assert self.pool.refs(page) == self.refs.get(page, 0)
        for page, content in self.content.items():
            assert self.pool.lookup(content) == page


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
