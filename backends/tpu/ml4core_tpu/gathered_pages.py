"""The pages of a cache that a step reads or writes, brought together.

Programs of the host are handed these in place of the whole pool, so that they are made for few
sizes of pools, and copy no page that they don't need. Which pages those are is the host's own
arithmetic, in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml4core.api import StepPlan
from ml4core_tpu.bridge import bucket


def seen_pages(
    plan: StepPlan, group: str, page: int, blocks: int, more: Sequence[Tensor] = ()
) -> Tensor:
    """The pages int64 [n] of a pool of ``blocks``, ascending: those of keys that rows see, and
    those that a row's slot, or one of ``more``, lies in.
    """
    table = plan.block_tables[group].numpy()
    slots = [one.numpy().reshape(-1) for one in (plan.slots[group], *more)]
    entries = table[_seen(plan, group, page)]
    every = np.concatenate((entries, *(one // page for one in slots)))
    used = np.zeros(blocks, bool)
    used[every[(every >= 0) & (every < blocks)]] = True
    return torch.from_numpy(np.flatnonzero(used))


def _seen(plan: StepPlan, group: str, page: int) -> NDArray[np.bool_]:
    """[R, B]: which entries of a table hold keys that a row sees."""
    requests, columns = plan.block_tables[group].shape
    visible = plan.visible.numpy()
    rows = visible > 0
    most = np.zeros(requests, visible.dtype)
    np.maximum.at(most, plan.row_request.numpy()[rows], visible[rows])
    return np.arange(columns) * page < most[:, None]


@dataclass(frozen=True)
class GatheredPages:
    """Some pages of a pool as a pool of their own.

    Attributes:
        pages: int64 [n], ascending; page i of the new pool is page ``pages[i]`` of the old one.
        size: of the new pool; behind its n pages others stand that nothing looks at.
        blocks: of the old pool.
        page: tokens of a page.
    """

    pages: Tensor
    size: int
    blocks: int
    page: int

    @classmethod
    def of(cls, pages: Tensor, size: int, blocks: int, page: int) -> GatheredPages:
        """A pool of ``size`` pages, or of the power of two that it takes."""
        return cls(pages, size if len(pages) <= size else bucket(len(pages)), blocks, page)

    def parts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """A cache's parts [blocks, ...] as [size, ...], copied."""
        taken = torch.cat((self.pages, self.pages.new_zeros(self.size - len(self.pages))))
        return [part[taken] for part in parts]

    def table(self, plan: StepPlan, group: str) -> Tensor:
        """A group's table with the new pages; entries of keys that no row sees become page 0."""
        table = plan.block_tables[group]
        found = self._local(table.long(), self.size)
        seen = torch.from_numpy(_seen(plan, group, self.page))
        return torch.where(seen, found, 0).to(table.dtype)

    def slots(self, slots: Tensor) -> Tensor:
        """Slots of the new pool. What lies in no page of it stays negative, or is beyond it."""
        old = slots.long()
        page = old.div(self.page, rounding_mode="floor")
        new = self._local(page, self.size) * self.page + old % self.page
        return torch.where(old < 0, old, new).to(slots.dtype)

    def back(self, slots: Tensor) -> Tensor:
        """The old pool's slots of slots of the new one; negative ones stay."""
        new = slots.long()
        known = (new >= 0) & (new < len(self.pages) * self.page)
        place = torch.where(known, new, 0).div(self.page, rounding_mode="floor")
        old = self.pages[place] * self.page + new % self.page if len(self.pages) else new
        return torch.where(known, old, new).to(slots.dtype)

    def written(self, held: Tensor, found: Tensor, slots: Tensor) -> None:
        """Copies the pages that ``slots`` lie in from ``found`` [size, ...] to ``held``."""
        page = slots.numpy() // self.page
        touched = torch.from_numpy(np.unique(page[(page >= 0) & (page < self.blocks)]))
        place = torch.searchsorted(self.pages, touched)
        held.index_copy_(0, touched, found.index_select(0, place))

    def _local(self, page: Tensor, beyond: int) -> Tensor:
        """Places of pages int64; ``beyond`` for one that isn't there."""
        if not len(self.pages):
            return torch.full_like(page, beyond)
        place = torch.searchsorted(self.pages, page).clamp(max=len(self.pages) - 1)
        return torch.where(self.pages[place] == page, place, beyond)
