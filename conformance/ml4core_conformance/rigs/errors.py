"""The judgement of results for which no bound is known in advance: stages and whole models.

A row's error is its distance from fp64 as a share of its length. It may be twice what the worst row
of the oracle's twin loses, which rounds each op's result to the dtype of activations, plus a floor
for the order of fp32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ml4core_conformance.check import CheckFailed, Measure
from ml4core_conformance.subject import Subject

FACTOR = 2.0
FLOOR = 2.0**-15
"""Of a row of one stage: fp32 sums of some hundred terms, relative to the row's length."""


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Distance of each row (last axis) from that of fp64, as a share of its length; inf where one
    is not finite and the other is.
    """
    got, want = got.to(torch.float64), want.to(torch.float64)
    length = want.norm(dim=-1)
    error = (got - want).norm(dim=-1) / length.clamp(min=1e-30)
    error = torch.where((length == 0) & (got == 0).all(-1), 0.0, error)
    return torch.where(error.isnan(), torch.inf, error)


def judge(
    subject: Subject,
    what: str,
    got: Tensor,
    exact: Tensor,
    twin: Tensor,
    where: str,
    axes: Sequence[str] = ("row",),
    floor: float = FLOOR,
) -> None:
    """Measures the worst row of ``got`` [..., n]; ``axes`` name all of its axes but the last."""
    if tuple(got.shape) != tuple(exact.shape):
        raise CheckFailed(f"{what}: shape {list(got.shape)}, wanted {list(exact.shape)}; {where}")
    if got.numel() == 0:
        return
    errors = row_errors(got, exact)
    bound = FACTOR * _worst(row_errors(twin, exact)) + floor
    at = int(errors.argmax())
    place = []
    for axis, size in zip(reversed(axes), reversed(errors.shape), strict=True):
        place.append(f"{axis} {at % size}")
        at //= size
    slice = ", ".join(reversed(place))
    subject.measure(Measure(what, float(errors.max()), bound, f"{where}, {slice}"))


def stored(
    subject: Subject,
    what: str,
    got: Tensor,
    exact: Tensor,
    twin: Tensor,
    best: Tensor,
    where: str,
    floor: float,
) -> None:
    """Measures rows ``got`` [T, n] that a cache holds of the rows ``exact``: how much further off
    the worst one is than ``best``, which is ``exact`` through the cache's own rounding. ``twin``
    are the rows that the oracle's twin would store.

    A value near the middle of two stored numbers may fall to either: that costs nothing here.
    """
    beyond = row_errors(got, exact) - row_errors(best, exact)
    bound = FACTOR * _worst(row_errors(twin, exact)) + floor
    at = int(beyond.argmax())
    error = max(0.0, float(beyond[at]))
    subject.measure(Measure(what, error, bound, f"{where}, row {at}, beyond its own rounding"))


def _worst(errors: Tensor) -> float:
    finite = errors[errors.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def finite(what: str, x: Tensor, where: str) -> None:
    """Raises ``CheckFailed`` if anything of ``x`` is not finite."""
    if not bool(x.isfinite().all()):
        count = int((~x.isfinite()).sum())
        raise CheckFailed(f"{what}: {count} values are not finite; {where}")


def equal(what: str, got: Tensor, want: Tensor, where: str) -> None:
    """Raises ``CheckFailed`` unless two integer tensors are the same."""
    got, want = got.cpu(), want.cpu()
    if got.dtype != want.dtype or got.shape != want.shape:
        raise CheckFailed(
            f"{what}: {got.dtype} {list(got.shape)}, wanted {want.dtype} {list(want.shape)}; "
            f"{where}"
        )
    if not torch.equal(got, want):
        at = (got != want).nonzero()[0].tolist()
        index = tuple(at)
        raise CheckFailed(
            f"{what}: {got[index].item()} at {at}, wanted {want[index].item()}; {where}"
        )
