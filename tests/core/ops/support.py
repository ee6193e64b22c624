"""Inputs, caches and comparisons that the tests of ops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache, KVLayout
from ml4core.api.pages import TILE, token_views

Check = Callable[[], None]
Corners = Mapping[str, Mapping[str, Check]]
"""By op and name of a corner of its contract: what tries it."""

NAN, INF = float("nan"), float("inf")
EPS32 = 2.0**-23


def corner_cases(corners: Corners) -> pytest.MarkDecorator:
    """Parametrises ``check`` over the corners, each with its op and name as id."""
    cases = [
        pytest.param(check, id=f"{op}: {corner}")
        for op, checks in corners.items()
        for corner, check in checks.items()
    ]
    return pytest.mark.parametrize("check", cases)


class Draw:
    """Random inputs of one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)


def make_cache(
    layout: KVLayout, rows: Tensor, *, strided: bool = False, scale: float | None = None
) -> KVCache:
    """A cache that holds ``rows`` [blocks, block_size, width]; strided: with room between pages."""
    factor = None if scale is None else torch.tensor([scale])
    packed = layout.pack(rows, factor)
    parts = tuple(strided_copy(array) if strided else array for array in packed)
    return KVCache(layout, rows.shape[1], parts, factor)


def strided_copy(array: Tensor) -> Tensor:
    """The same values, with pages further apart than they are long."""
    page = array[0].numel()
    room = torch.full((array.shape[0], page + 40), 0x5A).to(array.dtype)
    view = room[:, 8 : 8 + page].view(array.shape)
    view.copy_(array)
    assert not view.is_contiguous() or array.shape[0] == 1
    return view


def poison(cache: KVCache, slots: Sequence[int] | Tensor, value: float = NAN) -> None:
    """Fills slots with 0xFF bytes, or with ``value`` where the array is of floats."""
    index = torch.as_tensor(slots, dtype=torch.int64)
    page, offset = index // cache.block_size, index % cache.block_size
    for number, array in enumerate(cache.parts):
        fill = 0xFF if array.dtype == torch.uint8 else value
        for _, view in token_views(cache.layout, number, array, cache.block_size):
            if view.dim() == 3:
                view[page, offset] = fill
            else:
                view[page, offset // TILE, offset % TILE] = fill


def raw(cache: KVCache) -> bytes:
    """All bytes of a cache, those between its pages too."""
    whole = (torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()) for part in cache.parts)
    return b"".join(memory.numpy().tobytes() for memory in whole)


def assert_close(
    got: Tensor, want: Tensor, size: Tensor | float, terms: int, slack: float = 1.0
) -> None:
    """``got`` is ``want`` (float64) up to its own rounding and that of a sum in fp32.

    ``size`` is the sum of the magnitudes of the terms, ``terms`` their number.
    """
    assert got.shape == want.shape
    wide = got.to(torch.float64)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(wide), kind(want)), f"{kind.__name__} differs"
    finite = torch.isfinite(want)
    error = torch.where(finite, (wide - want).abs(), 0.0)
    magnitude = torch.as_tensor(size, dtype=torch.float64).expand(want.shape)
    bound = 2 * torch.finfo(got.dtype).eps * want.abs() + 4 * EPS32 * terms**0.5 * magnitude
    worst = torch.where(finite, error - slack * bound, -1.0)
    where = torch.unravel_index(worst.argmax(), want.shape) if want.numel() else ()
    assert not want.numel() or worst.max() <= 0, (
        f"at {[int(i) for i in where]}: got {wide[where]}, want {want[where]}, "
        f"error {error[where]:.3g} above {bound[where]:.3g}"
    )
