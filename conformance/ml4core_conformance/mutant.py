"""A backend that is wrong on purpose, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ml4core.api import Backend


@dataclass(frozen=True)
class Mutant:
    """A wrong backend, made from any honest one. It must die at the checks that it names.

    Attributes:
        doc: what it does wrong, in a sentence.
        wrap: the honest backend in, the wrong one out. A function or instance of a module, as it
            is pickled for worker processes.
        dies_at: full ids of checks, ids with ``*`` for any text, or families: of what each means,
            one check at least must FAIL.
    """

    name: str
    doc: str
    wrap: Callable[[Backend], Backend]
    dies_at: tuple[str, ...]
