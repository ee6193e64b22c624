"""What the oracle says about a result, and how it is to be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Float:
    """A result in floating point.

    Attributes:
        value: fp64, on the CPU, exact but for fp64 rounding; inf and NaN where the contract says.
        size: fp64, broadcastable to ``value``: how large partial sums may get, on which it depends
            what an fp32 sum rounds: the sum of the magnitudes of the terms; or, where the drawn
            terms are independent, ``|value| + sqrt(sum of squares)``, which is much tighter.
        terms: length of the reduction.
        dtype: torch name of the result's dtype, e.g. ``bfloat16``.
        axes: names of the axes, as in the contract; structure is judged along each of the first
            ones and heads, tokens and experts are named by them in messages.
        slack: fp64, broadcastable: what else the contract allows, e.g. a rounding that it leaves
            open. None is none.
    """

    value: Tensor
    size: Tensor
    terms: int
    dtype: str
    axes: tuple[str, ...]
    slack: Tensor | None = None


@dataclass(frozen=True)
class Exact:
    """Integers, booleans or bytes: equal, bit for bit.

    Attributes:
        value: of the result's own dtype.
        mask: bool, broadcastable: only these are compared; None is all.
    """

    value: Tensor
    axes: tuple[str, ...]
    mask: Tensor | None = None


@dataclass(frozen=True)
class Selected:
    """Positions or ids that were chosen by score.

    They must be reachable, unique, front-packed and padded with -1. Where the scores' distance
    exceeds ``margin`` they must be those of ``value``; nearer ones are compared by sorted score.

    Attributes:
        value: int [T, k], -1 behind.
        scores: fp64 [T, S] of every candidate; NaN candidates are never chosen.
        visible: int [T], candidates from 0 that may be chosen.
        margin: fp64, broadcastable to [T]: 0 where the op is given the scores themselves.
        ordered: ``position``, ``score`` or ``any``: the order that the contract demands.
    """

    value: Tensor
    scores: Tensor
    visible: Tensor
    margin: Tensor
    axes: tuple[str, ...]
    ordered: str = "position"


@dataclass(frozen=True)
class Law:
    """Draws whose distribution is judged, not their values.

    Attributes:
        probabilities: fp64 [cells] of the outcomes; they add up to 1.
        outcomes: what each cell means, for messages.
        cell: maps the op's results to cells, int64 [draws].
    """

    probabilities: Tensor
    outcomes: tuple[str, ...]
    cell: Any


@dataclass(frozen=True)
class Expected:
    """Everything about one call.

    Attributes:
        results: by the names of the contract's returns; None where the call's is None. The parts
            of a ``Weight`` are named ``weight.data`` and so on.
        caches: by argument name of ``writes``: the parts that must be there afterwards, of the
            dtypes and shapes of ``Pages.parts``, compared as bytes.
            Every byte that isn't the case's to write is that of before.
    """

    results: dict[str, Float | Exact | Selected | Law | None] = field(default_factory=dict)
    caches: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
