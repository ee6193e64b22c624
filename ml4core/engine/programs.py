"""What was made for a step's shape, kept while it is of use."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_PROGRAMS = 256
"""Step shapes whose programs are kept, those used last. A program of a large model takes some
hundred kilobytes on the host, and prompts have as many shapes as lengths.
"""


class Programs(Generic[K, V]):
    """Values by key: the ``MAX_PROGRAMS`` that were used last, and all that are pinned."""

    def __init__(self, pinned: Callable[[K], bool] = lambda key: False) -> None:
        """``pinned``: keys whose values are always kept, such as the shapes of captured graphs,
        which a run of prompts must not push out.
        """
        self._pinned = pinned
        self._kept: dict[K, V] = {}
        self._recent: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        if (found := self._kept.get(key)) is not None:
            return found
        found = self._recent.pop(key, None)
        if found is None:
            found = make()
            if self._pinned(key):
                self._kept[key] = found
                return found
            if len(self._recent) >= MAX_PROGRAMS:
                del self._recent[next(iter(self._recent))]
        self._recent[key] = found  # to the end: the first is the one used longest ago
        return found

    def clear(self) -> None:
        self._kept.clear()
        self._recent.clear()
