"""Compares a result with what the oracle says. A difference that isn't allowed raises
``CheckFailed``; what has a bound comes back as a ``Measure``, for the caller to judge.

``where`` is the case, for messages. All tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from ml4core_conformance.check import CheckFailed, Measure
from ml4core_conformance.oracle.expected import Exact, Float
from ml4core_conformance.placement import to_bytes
from ml4core_conformance.tolerances import EPS, TINY, Tolerance


def place_of(element: int, shape: Sequence[int], axes: Sequence[str]) -> str:
    """An element in words, e.g. ``T 3, N 5, L 17``."""
    if not shape:
        return "the only element"
    index = [int(i) for i in torch.unravel_index(torch.tensor(element), tuple(shape))]
    if len(axes) != len(index):
        return f"element {index}"
    return ", ".join(f"{axis} {i}" for axis, i in zip(axes, index, strict=True))


def anomalies(name: str, found: Tensor, want: Float, where: str) -> None:
    """NaN, +inf and -inf are where the oracle has them, and nowhere else."""
    # In the result's dtype, as a value beyond its range becomes infinite.
    due = want.value.to(getattr(torch, want.dtype))
    for what, has in (
        ("NaN", torch.isnan),
        ("+inf", torch.isposinf),
        ("-inf", torch.isneginf),
    ):
        wrong = (has(found) != has(due)).flatten()
        if wrong.any():
            first = int(wrong.nonzero()[0])
            place = place_of(first, found.shape, want.axes)
            raise CheckFailed(
                f"{name}: {what} differs in {int(wrong.sum())} of {wrong.numel()} elements, first "
                f"at {where}, {place}: found {float(found.flatten()[first]):.6g}, wanted is "
                f"{float(want.value.flatten()[first]):.6g}"
            )


def elements(name: str, found: Tensor, want: Float, tolerance: Tolerance, where: str) -> Measure:
    """The element whose error is largest for what it is allowed."""
    error, _, finite = _errors(found, want)
    allowed = _allowed(want, tolerance, tolerance.ulps * EPS[want.dtype]) + TINY
    ratio = torch.where(finite, error / allowed, 0.0).flatten()
    if not ratio.numel():
        return Measure(f"{name} elements", 0.0, 0.0, where)
    worst = int(ratio.argmax())
    place = place_of(worst, found.shape, want.axes)
    return Measure(
        f"{name} elements",
        float(error.flatten()[worst]) if ratio[worst] else 0.0,
        float(allowed.flatten()[worst]),
        f"{where}, {place}",
    )


def structure(
    name: str, found: Tensor, want: Float, tolerance: Tolerance, where: str
) -> Iterator[Measure]:
    """The worst slice along each axis, by root mean square; relative where the slice isn't zero."""
    error, value, finite = _errors(found, want)
    allowed = torch.where(finite, _allowed(want, tolerance, tolerance.rms) + TINY, 0.0)
    for axis in range(found.dim()):
        others = [other for other in range(found.dim()) if other != axis]
        if found.numel() == 0 or not others:
            continue
        mean = [(x * x).mean(others).sqrt() for x in (error, allowed, value)]
        worst = int((mean[0] / mean[1].clamp(min=TINY)).argmax())
        wrong, bound, size = (float(one[worst]) for one in mean)
        unit = size if size > 0 else 1.0
        axis_name = want.axes[axis] if len(want.axes) == found.dim() else f"axis {axis}"
        yield Measure(
            f"{name} relative RMS by {axis_name}",
            wrong / unit,
            max(bound, TINY) / unit,
            f"{where}, {axis_name} {worst}",
        )


def bias(
    name: str, found: Tensor, want: Float, tolerance: Tolerance, where: str
) -> Iterator[Measure]:
    """The gain and the angle of the whole result."""
    _, value, finite = _errors(found, want)
    # Products of large values would overflow.
    scale = float(value.abs().amax()) if value.numel() else 0.0
    if scale == 0:
        return
    r, x = value / scale, torch.where(finite, found.to(torch.float64), 0.0) / scale
    rr, xr, xx = float((r * r).sum()), float((x * r).sum()), float((x * x).sum())
    # How far rounding that favours no direction can move the gain: it averages out over elements.
    random = _allowed(want, tolerance, tolerance.ulps * EPS[want.dtype]) / scale
    random = torch.where(finite, random, 0.0)
    noise = sqrt(float(((random * r) ** 2).sum())) / rr
    yield Measure(f"{name} gain", abs(xr / rr - 1), tolerance.gain + noise, where)
    sums = torch.where(finite, _allowed(want, tolerance, 0.0), 0.0) / scale
    loss = float((sums * sums).sum()) / rr / 2
    cosine = xr / sqrt(rr * xx) if xx > 0 else 0.0
    yield Measure(f"{name} 1 - cosine", max(0.0, 1 - cosine), tolerance.cosine + loss, where)


def exact(name: str, found: Tensor, want: Exact, where: str) -> None:
    """Equal, bit for bit, where the oracle's mask says."""
    if found.dtype != want.value.dtype or found.shape != want.value.shape:
        raise CheckFailed(
            f"{name} is {found.dtype} {list(found.shape)} at {where}; wanted is "
            f"{want.value.dtype} {list(want.value.shape)}"
        )
    wrong = different(found, want.value)
    if found.is_floating_point():  # which NaN it is has no meaning
        wrong = wrong & ~(torch.isnan(found) & torch.isnan(want.value))
    if want.mask is not None:
        wrong = wrong & want.mask.expand(wrong.shape)
    if wrong.any():
        flat = wrong.flatten()
        first = int(flat.nonzero()[0])
        got, due = found.flatten()[first].item(), want.value.flatten()[first].item()
        raise CheckFailed(
            f"{name}: {int(flat.sum())} of {flat.numel()} values differ, first at {where}, "
            f"{place_of(first, found.shape, want.axes)}: found {got}, wanted is {due}"
        )


def different(a: Tensor, b: Tensor) -> Tensor:
    """Which elements bool [...] differ in any bit."""
    if a.dim() == 0 or a.numel() == 0:
        return (to_bytes(a) != to_bytes(b)).any(-1).reshape(a.shape) if a.numel() else a != b
    wrong = to_bytes(a) != to_bytes(b)
    return wrong.view(*a.shape, a.element_size()).any(-1)


def caches(
    name: str, found: Sequence[Tensor], want: Sequence[Tensor], where: str, block_size: int
) -> None:
    """Each byte of a cache's parts is the one that the oracle says."""
    for index, (got, due) in enumerate(zip(found, want, strict=True)):
        a, b = to_bytes(got).flatten(1), to_bytes(due).flatten(1)
        wrong = (a != b).nonzero()
        if len(wrong):
            page, byte = (int(i) for i in wrong[0])
            raise CheckFailed(
                f"{name}.parts[{index}]: {len(wrong)} bytes differ, first at {where}, page {page}, "
                f"byte {byte} of {a.shape[1]} ({block_size} tokens a page): found "
                f"0x{int(a[page, byte]):02x}, wanted is 0x{int(b[page, byte]):02x}"
            )


def _errors(found: Tensor, want: Float) -> tuple[Tensor, Tensor, Tensor]:
    """|found - value| and value in fp64, zero where either isn't finite; and where both are."""
    finite = torch.isfinite(want.value) & torch.isfinite(found)
    value = torch.where(finite, want.value, 0.0)
    wide = torch.where(finite, found.to(torch.float64), 0.0)
    return (wide - value).abs(), value, finite


def _allowed(want: Float, tolerance: Tolerance, rounding: float) -> Tensor:
    """What each element is allowed, with ``rounding`` as the share of its value."""
    size = torch.nan_to_num(want.size, 0.0, 0.0, 0.0)
    allowed = rounding * torch.nan_to_num(want.value, 0.0, 0.0, 0.0).abs()
    allowed = allowed + tolerance.sums * EPS["float32"] * sqrt(max(1, want.terms)) * size
    return allowed if want.slack is None else allowed + want.slack
