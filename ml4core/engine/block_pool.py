"""Pages of one KV group: who holds them, which are free, and what the free ones still contain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_PAGE = 0
"""Page 0 of every group: padding and dropped entries of a table name it; it is never written."""


class PoolExhausted(MemoryError):
    """A pool has too few free pages."""


class BlockPool:
    """Reference counts, a free list and the prefix cache of one group, in its own id space.

    The free list is used from its head. A page that is given back with a hash goes to the tail, so
    that its content lasts longest; one without goes to the head. Allocation drops a page's hash.
    """

    def __init__(self, group: str, blocks: int) -> None:
        """``blocks`` counts the null page."""
        if blocks < 2:
            raise ValueError(
                f"the {group} pool needs at least 2 pages (page 0 is the null page), got {blocks}"
            )
        self.group = group
        self.blocks = blocks
        self._refs = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.blocks - 1 - len(self._free)

    @property
    def cached_pages(self) -> int:
        """Pages, held or free, that a lookup can find."""
        return len(self._page_of)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def allocate(self, count: int) -> list[int]:
        """Takes pages, each with one reference. Raises ``PoolExhausted`` and takes none if there
        are too few.
        """
        if count > len(self._free):
            raise PoolExhausted(
                f"the {self.group} pool has {len(self._free)} free pages, {count} are wanted"
            )
        pages = []
        for _ in range(count):
            page, _none = self._free.popitem(last=False)
            self._forget(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def lookup(self, block_hash: bytes) -> int | None:
        """The page that holds a block, free or not."""
        return self._page_of.get(block_hash)

    def touch(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages that a lookup found."""
        for page in pages:
            if page == NULL_PAGE:
                continue
            if self._refs[page] == 0:
                del self._free[page]
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drops a reference of each page, in this order: of pages with a hash the first is the
        first to be used again, of those without the last is.
        """
        for page in pages:
            if page == NULL_PAGE:
                continue
            if self._refs[page] < 1:
                raise ValueError(f"page {page} of the {self.group} pool is not held")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free[page] = None
                if page not in self._hash_of:
                    self._free.move_to_end(page, last=False)

    def insert(self, page: int, block_hash: bytes) -> None:
        """Makes a held page findable. Does nothing if another page already holds that block."""
        if self._refs[page] < 1:
            raise ValueError(f"page {page} of the {self.group} pool is not held")
        if block_hash not in self._page_of and page not in self._hash_of:
            self._page_of[block_hash] = page
            self._hash_of[page] = block_hash

    def reset(self) -> None:
        """Makes every page unfindable."""
        self._page_of.clear()
        self._hash_of.clear()

    def _forget(self, page: int) -> None:
        block_hash = self._hash_of.pop(page, None)
        if block_hash is not None:
            del self._page_of[block_hash]
