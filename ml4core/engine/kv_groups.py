"""KV groups: which keys a group keeps, and how many pages each is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KVGroup:
    """Layers whose keys share a page table.

    Attributes:
        window: None keeps every key; W keeps those that the next row sees, itself and the W - 1
            before it.
        required: whether a prefix can be reused only where this group has its keys. A drafter's
            group is not: without them its drafts are worse, and the output is the same.
        page_bytes: bytes of a page over all of the group's layers; used for sizing alone.
        ahead: rows behind a step's last one that the group holds, too: a block that is drafted.
            Such a group is read at the end of a step alone, so that of a long chunk only rows
            within the window are kept.
    """

    name: str
    window: int | None = None
    required: bool = True
    page_bytes: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"the {self.name} group keeps {self.window} keys; it must be 1 or more"
            )

    def pages_for(self, tokens: int, block_size: int, step_rows: int) -> int:
        """Pages that a sequence of ``tokens`` tokens holds at most, when no step computes more than
        ``step_rows`` of its rows.
        """
        whole = -(-(tokens + self.ahead) // block_size)
        if self.window is None:
            return whole
        if self.ahead:
            step_rows = self.slack + self.ahead
        # A window starts anywhere in its first page: one page more than its keys fill.
        return min(whole, -(-(self.window - 1 + step_rows) // block_size) + 1)

    @property
    def slack(self) -> int:
        """Of a group with ``ahead``: rows at the end that count as there and may be rejected yet,
        those of two verify windows.
        """
        return 2 * (self.ahead + 1)


def size_groups(
    groups: Sequence[KVGroup],
    nbytes: int,
    block_size: int,
    *,
    max_num_seqs: int,
    max_model_len: int,
    step_rows: int,
) -> Mapping[str, int]:
    """Pages by group, null pages included, that fit in ``nbytes``.

    Windowed groups come first: what ``max_num_seqs`` sequences hold at most. The rest is shared so
    that all other groups hold the same count of tokens. Raises ``ValueError`` if that leaves less
    than a page.
    """
    sizes = {
        group.name: group.pages_for(max_model_len, block_size, step_rows) * max_num_seqs + 1
        for group in groups
        if group.window is not None
    }
    windowed = sum(sizes[group.name] * group.page_bytes for group in groups if group.window)
    full = [group for group in groups if group.window is None]
    page = sum(group.page_bytes for group in full)
    if full:
        pages = (nbytes - windowed) // page
        if pages < 2:
            raise ValueError(
                f"{nbytes} bytes of KV cache leave {nbytes - windowed} beside the windowed groups "
                f"({windowed} bytes); at least {2 * page} are needed"
            )
        sizes |= {group.name: pages for group in full}
    return sizes
