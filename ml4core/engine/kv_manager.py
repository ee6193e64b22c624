"""Pages of requests over all KV groups, and the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ml4core.engine.block_hash import ROOT
from ml4core.engine.block_pool import NULL_PAGE, BlockPool
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.request import Request


@dataclass(frozen=True)
class Hit:
    """A prefix that the cache holds.

    Attributes:
        tokens: its length, whole blocks.
        pages: by group, one entry a block; the null page where a window has passed.
        key_start: by group, the first token with a key, for groups that lack some of their window.
    """

    tokens: int = 0
    pages: Mapping[str, list[int]] = field(default_factory=dict)
    key_start: Mapping[str, int] = field(default_factory=dict)


NO_HIT = Hit()


@dataclass
class CacheCounts:
    """Tokens looked up in one group's cache, and tokens found."""

    queries: int = 0
    hits: int = 0


class KVManager:
    """Hands out pages: to a request in every group, or in none.

    ``step_rows`` is the most rows of one request that may be computed and not yet confirmed.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        pools: Mapping[str, BlockPool],
        block_size: int,
        *,
        step_rows: int,
        caching: bool = False,
        root: bytes = ROOT,
    ) -> None:
        """``root``: what blocks are of, beside their tokens."""
        self.groups = tuple(groups)
        self.pools = pools
        self.block_size = block_size
        self.caching = caching
        self._root = root
        self.step_rows = step_rows
        self.counts = {group.name: CacheCounts() for group in groups}

    def room(self, tokens: int) -> int:
        """The most of ``tokens`` tokens that one sequence can hold when nothing else is held."""
        for group in self.groups:
            pages = self.pools[group.name].blocks - 1
            if group.pages_for(tokens, self.block_size, self.step_rows) > pages:
                tokens = pages * self.block_size - group.ahead
        return tokens

    def usage(self) -> dict[str, float]:
        """Part of each group's pages that requests hold, 0 to 1."""
        return {name: pool.used_pages / (pool.blocks - 1) for name, pool in self.pools.items()}

    def find_hit(self, request: Request) -> Hit:
        """The longest cached prefix. It leaves a token at least to compute, whose logits are
        wanted.
        """
        if not self.caching or not request.read_cache:
            return NO_HIT
        blocks = (request.num_tokens - 1) // self.block_size
        hashes = request.hashes(blocks, self.block_size, self._root)
        pages: dict[str, list[int]] = {}
        for group in self.groups:
            if group.window is None:
                found = self._prefix(group, hashes, blocks)
                pages[group.name] = found
                blocks = len(found)
        windowed = [group for group in self.groups if group.window is not None]
        shorter = True
        while shorter and blocks:  # each group may shorten what another one agreed to
            before = blocks
            for group in windowed:
                if group.required:
                    blocks = self._window_end(group, hashes, blocks)
            shorter = blocks < before
        if not blocks:
            return NO_HIT
        pages = {name: found[:blocks] for name, found in pages.items()}
        key_start = {}
        for group in windowed:
            run = self._run(group, hashes, blocks)
            pages[group.name] = [NULL_PAGE] * (blocks - len(run)) + run
            if len(run) < min(self._window_blocks(group), blocks):
                key_start[group.name] = (blocks - len(run)) * self.block_size
        return Hit(blocks * self.block_size, pages, key_start)

    def fits(self, request: Request, tokens: int, hit: Hit, others: Sequence[Request]) -> bool:
        """Whether a waiting request's first ``tokens`` tokens would fit beside what ``others``
        still need for their own.
        """
        for group in self.groups:
            found = hit.pages.get(group.name, ())
            need = group.pages_for(tokens, self.block_size, self.step_rows)
            need += self._revived(group, found) - sum(1 for page in found if page)
            need += sum(self._owed(group, other) for other in others)
            if need > self.pools[group.name].free_pages:
                return False
        return True

    def allocate(self, request: Request, rows: int, hit: Hit = NO_HIT) -> bool:
        """Room for the next ``rows`` rows, and what a group holds ahead of them. False, and nothing
        taken, if a group has too few pages.

        ``hit`` is for a request without pages: what ``find_hit`` just gave.
        """
        start, size = hit.tokens or request.num_computed, self.block_size
        passed = {}
        for group in self.groups:
            if group.window is not None:
                passed[group.name] = self._passed(group, request, start + rows)
                self._drop(group, request, passed[group.name])
        needs, reused = {}, {}
        for group in self.groups:
            found = hit.pages.get(group.name, [])
            if group.ahead and found:
                gone = min(passed.get(group.name, 0), len(found))
                found = [NULL_PAGE] * gone + found[gone:]
            reused[group.name] = found
            held = len(request.pages.get(group.name, ())) or len(found)
            blocks = -(-(start + rows + group.ahead) // size)
            skipped = max(0, min(passed.get(group.name, 0), blocks) - held) if group.ahead else 0
            needs[group.name] = skipped, max(0, blocks - held - skipped)
            free = self.pools[group.name].free_pages - self._revived(group, found)
            if needs[group.name][1] > free:
                return False
        if hit.tokens:
            for name, found in reused.items():
                self.pools[name].touch(found)
                request.pages[name] = list(found)
        for name, (skipped, need) in needs.items():
            pages = request.pages.setdefault(name, [])
            pages += [NULL_PAGE] * skipped
            pages += self.pools[name].allocate(need)
        room = min(len(request.pages[group.name]) * size - group.ahead for group in self.groups)
        request.capacity = max(request.capacity, room)
        if hit.tokens:
            request.cached_blocks = hit.tokens // self.block_size
            request.key_start = dict(hit.key_start)
        return True

    def count(self, request: Request, hit: Hit) -> None:
        """Adds an admission to the counts of queries and hits."""
        if not self.caching or not request.read_cache:
            return
        for group in self.groups:
            counts = self.counts[group.name]
            counts.queries += request.num_tokens
            counts.hits += max(0, hit.tokens - hit.key_start.get(group.name, 0))

    def cache(self, request: Request) -> None:
        """Makes the full blocks of confirmed tokens findable."""
        # Of a run of drafts that an end cut short, some were accepted and are no tokens.
        full = min(request.num_confirmed, request.num_tokens) // self.block_size
        if not self.caching or full <= request.cached_blocks:
            return
        hashes = request.hashes(full, self.block_size, self._root)
        for group in self.groups:
            pages, pool = request.pages[group.name], self.pools[group.name]
            for block in range(request.cached_blocks, full):
                if pages[block] != NULL_PAGE:
                    pool.insert(pages[block], hashes[block])
        request.cached_blocks = full

    def free(self, request: Request) -> None:
        """Gives all pages back, the last one first: the start of a prefix is kept longest."""
        for name, pages in request.pages.items():
            self.pools[name].release(reversed(pages))
        request.pages = {}
        request.capacity = 0
        request.cached_blocks = 0
        request.key_start = {}

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block; False, and nothing done, while requests hold pages."""
        if any(pool.used_pages for pool in self.pools.values()):
            return False
        for pool in self.pools.values():
            pool.reset()
        return True

    def _passed(self, group: KVGroup, request: Request, end: int) -> int:
        """Blocks that no row to come can see, of a request whose next step ends at token ``end``.

        Counts from confirmed tokens: a step in flight still reads what its rows see. A group that
        is read at the end of a step alone counts from there.
        """
        assert group.window is not None
        first = end - group.slack if group.ahead else request.num_confirmed
        return max(0, first - group.window + 1) // self.block_size

    def _drop(self, group: KVGroup, request: Request, passed: int) -> None:
        """Gives back the pages of the first ``passed`` blocks."""
        pages = request.pages.get(group.name)
        if not pages:
            return
        passed = min(passed, len(pages))
        gone = []
        while passed and pages[passed - 1] != NULL_PAGE:
            passed -= 1
            gone.append(pages[passed])
            pages[passed] = NULL_PAGE
        self.pools[group.name].release(gone)

    def _owed(self, group: KVGroup, request: Request) -> int:
        """Pages that a running request will yet take for the tokens it has."""
        pages = request.pages[group.name]
        held = len(pages) if group.window is None else len(pages) - pages.count(NULL_PAGE)
        return max(0, group.pages_for(request.num_tokens, self.block_size, self.step_rows) - held)

    def _revived(self, group: KVGroup, found: Sequence[int]) -> int:
        """Pages of a hit that are on the free list."""
        pool = self.pools[group.name]
        return sum(1 for page in found if page and pool.refs(page) == 0)

    def _prefix(self, group: KVGroup, hashes: Sequence[bytes], blocks: int) -> list[int]:
        lookup = self.pools[group.name].lookup
        found: list[int] = []
        for block in range(blocks):
            page = lookup(hashes[block])
            if page is None:
                break
            found.append(page)
        return found

    def _window_blocks(self, group: KVGroup) -> int:
        """Cached blocks before a row that together hold its window, but for the row itself."""
        assert group.window is not None
        return -(-(group.window - 1) // self.block_size)

    def _window_end(self, group: KVGroup, hashes: Sequence[bytes], blocks: int) -> int:
        """The longest prefix, of at most ``blocks`` blocks, whose last window is cached."""
        want = self._window_blocks(group)
        lookup = self.pools[group.name].lookup
        run = 0
        for block in range(blocks - 1, -1, -1):
            if run == want:
                return block + 1 + run
            run = run + 1 if lookup(hashes[block]) is not None else 0
        return run

    def _run(self, group: KVGroup, hashes: Sequence[bytes], blocks: int) -> list[int]:
        """The cached pages that end at block ``blocks``, at most a window of them."""
        lookup = self.pools[group.name].lookup
        run: list[int] = []
        for block in range(blocks - 1, max(-1, blocks - 1 - self._window_blocks(group)), -1):
            page = lookup(hashes[block])
            if page is None:
                break
            run.append(page)
        return run[::-1]
