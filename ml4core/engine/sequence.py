"""One request as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ml4core.engine.block_pool import BlockPool


@dataclass
class Sequence:
    """Tokens of a request and the pages that hold their keys.

    Attributes:
        token_ids: prompt, then output.
        prompt_len: tokens of the prompt.
        computed: tokens whose keys are in the caches. Set by the engine after a step.
        pages: page ids by group, in order of position.
    """

    token_ids: list[int]
    prompt_len: int
    computed: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)

    def grow(self, pools: dict[str, BlockPool], tokens: int, block_size: int) -> None:
        """Makes room for ``tokens`` tokens in every group, or raises ``PoolExhausted`` and changes
        nothing.
        """
        need = {g: -(-tokens // block_size) - len(self.pages.get(g, [])) for g in pools}
        taken: dict[str, list[int]] = {}
        try:
            for group, count in need.items():
                taken[group] = pools[group].allocate(max(0, count))
        except MemoryError:
            for group, pages in taken.items():
                pools[group].release(reversed(pages))
            raise
        for group, pages in taken.items():
            self.pages.setdefault(group, []).extend(pages)

    def release(self, pools: dict[str, BlockPool]) -> None:
        for group, pages in self.pages.items():
            pools[group].release(reversed(pages))
        self.pages = {}
