"""Tags: the half of an 8-byte pair that tells whether the other half is the one waited for.

A tag is unique for as long as the memory lives and is not zeroed: it counts the launches (an
epoch), and the exchanges within one. Both halves are stored by one aligned store, so that a reader
who sees the tag sees the value.
"""

from __future__ import annotations

from dataclasses import dataclass

TAG_MAX = 2**32 - 1
EMPTY = 0
"""What zeroed memory holds: no tag."""


class TagsUsedUp(RuntimeError):
    """The next step would repeat a tag. Works: a reset, by all ranks together."""


@dataclass(frozen=True)
class Tags:
    """Tags of a program that exchanges ``sites`` times an epoch, the last time at its end.

    Attributes:
        margin: epochs before the end at which a reset is due: steps in flight finish.
    """

    sites: int
    margin: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.sites <= TAG_MAX // (2 * (self.margin + 1)):
            raise ValueError(f"{self.sites} exchanges an epoch; works: 1 or more, and few enough")

    @property
    def epochs(self) -> int:
        """How many there are, from 0, before tags repeat."""
        return TAG_MAX // self.sites

    def tag(self, epoch: int, site: int) -> int:
        """The tag of exchange ``site`` in ``epoch``; never ``EMPTY``."""
        if not 0 <= site < self.sites:
            raise ValueError(f"exchange {site} of {self.sites}")
        if not 0 <= epoch < self.epochs:
            raise TagsUsedUp(
                f"epoch {epoch} of {self.epochs}: its tags were used before; works: a reset of the "
                "peers' memory by all ranks"
            )
        return 1 + epoch * self.sites + site

    def reset_due(self, epoch: int) -> bool:
        """Whether all ranks are to zero their memory before this epoch. They count alike, so they
        find it alike.
        """
        return epoch >= self.epochs - self.margin
