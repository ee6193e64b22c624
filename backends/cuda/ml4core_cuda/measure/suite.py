"""Every work, and those of chosen parts."""

from __future__ import annotations

from collections.abc import Iterator

from ml4core_cuda.measure import attention_works, layer_works, product_works
from ml4core_cuda.measure.work import Work


def all_works(*, small: bool) -> Iterator[Work]:
    """In the order in which they are measured. Imports triton."""
    yield from attention_works.works(small=small)
    yield from product_works.works(small=small)
    yield from layer_works.works(small=small)


def chosen(words: str, *, small: bool) -> list[Work]:
    """Works whose part, or name, begins with one of the comma-separated words; all without."""
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    return [
        work
        for work in all_works(small=small)
        if not wanted or any(w == work.part or work.name.startswith(w) for w in wanted)
    ]
