"""The form of an op's contract; ``ml4core.api.ops`` is the table of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arg:
    """An argument. ``axes`` is its shape in letters, None for a Python value; ``dtypes`` are torch
    names or kinds.
    """

    name: str
    dtypes: tuple[str, ...]
    axes: tuple[str, ...] | None = None
    optional: bool = False


@dataclass(frozen=True)
class OpSpec:
    """The contract of one op.

    Attributes:
        args: in call order.
        returns: the results, in order.
        writes: names of the only arguments that may change.
        corners: cases that any set of checks must contain.
        since: API version that introduced it.
        doc: the meaning.
    """

    name: str
    args: tuple[Arg, ...]
    returns: tuple[Arg, ...]
    doc: str
    writes: tuple[str, ...] = ()
    corners: tuple[str, ...] = ()
    since: int = 1
