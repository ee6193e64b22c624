"""Arguments of a case onto a device, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, KVLayout, Session, Weight
from ml4core.api.known_layouts import INDEX_IDS, LATENT_IDS, index_layout, latent_layout
from ml4core_conformance.case import Arguments, Pages
from ml4core_conformance.check import CheckFailed

GUARD = 0x5A
"""Byte that fills the pages between those of a strided cache."""


@dataclass
class Placed:
    """One copy of a case's arguments on a device.

    Attributes:
        given: what the op is called with, by name.
        whole: by name of a strided cache's argument: the parts of the allocation that it is a part
            of, and N, for a cache of every N-th page.
    """

    given: Arguments
    whole: dict[str, tuple[tuple[Tensor, ...], int]] = field(default_factory=dict)

    def read(self, before: Arguments) -> Arguments:
        """The arguments as they are now, on the CPU; caches as ``Pages``."""
        return {name: _read(value, before[name]) for name, value in self.given.items()}

    def trespasses(self) -> tuple[str, ...]:
        """Writes between the pages of strided caches, in words."""
        return tuple(
            f"{name}: byte {byte} of page {page} of the allocation was changed; the cache is each "
            f"{stride}th page of it"
            for name, (parts, stride) in self.whole.items()
            for part in parts
            for page, byte in _guard_writes(part, stride)
        )


def place(session: Session, arguments: Arguments, device: torch.device) -> Placed:
    """A fresh copy on ``device``: no call sees another's memory, nor that of the case."""
    placed = Placed({})
    for name, value in arguments.items():
        if isinstance(value, Pages):
            cache, whole = allocate(session, value)
            placed.given[name] = cache
            if value.page_stride > 1:
                placed.whole[name] = (whole.parts, value.page_stride)
        elif isinstance(value, Weight):
            parts = {key: copied(part, device) for key, part in value.parts.items()}
            placed.given[name] = Weight(value.format, value.shape, parts)
        elif isinstance(value, Tensor):
            placed.given[name] = copied(value, device)
        else:
            placed.given[name] = value
    return placed


def layout_of(session: Session, pages: Pages) -> KVLayout:
    """The open layout of that id at the published widths, or the session's private one.

    Raises ``CheckFailed`` for an id that neither has.
    """
    if pages.role == "latent" and pages.layout in LATENT_IDS:
        return latent_layout(pages.layout)
    if pages.role == "index" and pages.layout in INDEX_IDS:
        return index_layout(pages.layout)
    found = session.layouts.get(pages.layout)
    if found is None or found.role != pages.role:
        known = ", ".join(sorted(session.layouts)) or "none"
        raise CheckFailed(
            f"the session has no {pages.role} layout {pages.layout!r}; it has {known}"
        )
    return found


def allocate(session: Session, pages: Pages) -> tuple[KVCache, KVCache]:
    """The cache with the bytes of ``pages``, and the whole allocation that it is a view of.

    Both are the same without a page stride. The pages that the view leaves out hold ``GUARD``.
    ``CheckFailed`` if the session allocates anything but what the layout says.
    """
    layout, stride = layout_of(session, pages), pages.page_stride
    blocks = int(pages.parts[0].shape[0]) * stride
    whole = session.alloc_kv(layout, blocks, pages.block_size)
    _check_allocation(layout, blocks, pages.block_size, whole)
    if stride > 1:
        for array in whole.parts:
            array.view(torch.uint8).fill_(GUARD)
    parts = tuple(array[::stride] for array in whole.parts)
    for array, content in zip(parts, pages.parts, strict=True):
        array.copy_(content)
    scale = whole.scale if pages.scale is None else copied(pages.scale, parts[0].device)
    return replace(whole, parts=parts, scale=scale), whole


def copied(value: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides in memory of its own; the gaps of a strided view hold zeros."""
    if value.is_contiguous() or 0 in value.stride():
        copy = torch.empty(value.shape, dtype=value.dtype, device=device)
    else:
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        memory = torch.zeros(max(extent, 0), dtype=value.dtype, device=device)
        copy = memory.as_strided(value.shape, value.stride())
    return copy.copy_(value)


def on_cpu(value: Any) -> Any:
    """A copy on the CPU of a result: a tensor, a ``Weight``, or anything else as it is."""
    if isinstance(value, Weight):
        parts = {name: on_cpu(part) for name, part in value.parts.items()}
        return Weight(value.format, value.shape, parts)
    if isinstance(value, Tensor):
        if value.is_meta:  # it has no data, which is a problem of its form
            return torch.empty(value.shape, dtype=value.dtype)
        return value.detach().cpu().clone()
    return value


def to_bytes(value: Tensor) -> Tensor:
    """The bytes uint8 [..., n * itemsize] of a tensor on the CPU, in order."""
    # A copy, as an axis of one element may have any stride.
    dense = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return (dense.reshape(1) if dense.dim() == 0 else dense).view(torch.uint8)


def tensors(named: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of arguments or results, with a name such as ``weight.scale``."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Weight):
            yield from ((f"{name}.{key}", part) for key, part in value.parts.items())
        elif isinstance(value, KVCache | Pages):
            yield from ((f"{name}.parts[{i}]", part) for i, part in enumerate(value.parts))
            if value.scale is not None:
                yield f"{name}.scale", value.scale


def _check_allocation(layout: KVLayout, blocks: int, block_size: int, found: object) -> None:
    call = f"alloc_kv({layout.id!r}, {blocks}, {block_size})"
    if not isinstance(found, KVCache) or found.layout.id != layout.id:
        raise CheckFailed(f"{call} returned {found!r}; wanted is a KVCache of that layout")
    if len(found.parts) != len(layout.parts):
        raise CheckFailed(f"{call} has {len(found.parts)} parts; wanted are {len(layout.parts)}")
    for part, array in zip(layout.parts, found.parts, strict=True):
        shape = part.shape(blocks, block_size)
        if tuple(array.shape) != shape or array.dtype != getattr(torch, part.dtype):
            raise CheckFailed(
                f"{call}: part {part.name!r} is {array.dtype} {list(array.shape)}; the layout says "
                f"torch.{part.dtype} {list(shape)}"
            )


def _read(value: Any, before: Any) -> Any:
    if isinstance(value, KVCache):
        scale = None if before.scale is None else on_cpu(value.scale)
        return replace(
            before, parts=tuple(on_cpu(part).contiguous() for part in value.parts), scale=scale
        )
    return on_cpu(value)


def _guard_writes(part: Tensor, stride: int) -> Iterator[tuple[int, int]]:
    """The first changed byte of each page between, as page and byte."""
    data = to_bytes(part).flatten(1)
    for page in range(data.shape[0]):
        if page % stride:
            changed = (data[page] != GUARD).nonzero()
            if len(changed):
                yield page, int(changed[0])
