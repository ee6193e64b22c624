"""A session opened for one layout and page size, and what the suite does to its caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, KVLayout, Session
from ml4core_conformance.cache_inputs import SCALE, Role
from ml4core_conformance.offered import Offered, offered_ops
from ml4core_conformance.oracle.layouts import (
    INDEX_LAYOUTS,
    LATENT,
    LATENT_LAYOUTS,
    ByteLayout,
    byte_layout,
)
from ml4core_conformance.placement import on_cpu, to_bytes
from ml4core_conformance.subject import Subject

SETTING: Mapping[Role, tuple[str, str]] = {
    "latent": ("kv", "kv_layout"),
    "index": ("index", "index_layout"),
}
"""By role: the prefix of its capability words, and the deployment's field."""

GAP = 0xA5
"""Byte that fills what nobody has written."""


@dataclass(frozen=True)
class Bench:
    """Attributes:
    layout: as the backend has it.
    bytes: the oracle's own; None for a private layout.
    """

    session: Session
    ops: Mapping[str, Callable[..., Any]]
    layout: KVLayout
    bytes: ByteLayout | None
    block_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def known(self) -> ByteLayout:
        """The oracle's own layout, where it has it."""
        assert self.bytes is not None
        return self.bytes

    def allocate(self, blocks: int, guard: int = 0, stride: int = 1) -> tuple[KVCache, KVCache]:
        """A cache of every ``stride``-th page of an allocation with ``guard`` more pages at either
        end, and that allocation. Every byte is ``GAP``.
        """
        total = blocks * stride + 2 * guard
        whole = self.session.alloc_kv(self.layout, total, self.block_size)
        for part in whole.parts:
            part.copy_(_full(part, GAP))
        end = total - guard
        parts = tuple(part[guard:end:stride] for part in whole.parts)
        scale = whole.scale
        if self.bytes is not None and self.bytes.scaled:
            scale = torch.tensor([SCALE], device=self.device)
        return replace(whole, parts=parts, scale=scale), whole

    def holding(self, pages: Tensor) -> KVCache:
        """A cache with these bytes uint8 [blocks, bytes of a page] of an open layout."""
        assert self.bytes is not None
        cache, _ = self.allocate(pages.shape[0])
        cache.parts[0].copy_(self.bytes.array(pages, self.block_size).to(self.device))
        return cache

    def write(self, cache: KVCache, slots: Tensor, rows: Tensor) -> None:
        """Writes rows fp32 [n, width], in the dtype of activations, by the backend's op."""
        rows = rows.to(self.device, self.dtype)
        slots = slots.to(self.device)
        if self.layout.role == "index":
            self.ops["indexer_write"](cache, slots, rows)
        else:
            latent = latent_width(self.layout)
            split = rows[:, :latent].contiguous(), rows[:, latent:].contiguous()
            self.ops["kv_write"](cache, slots, *split)

    def gather(self, cache: KVCache, slots: Tensor) -> Tensor:
        """Rows fp32 [n, width] on the CPU, by the backend's op."""
        rows: Tensor = on_cpu(self.ops["gather_kv"](cache, slots.to(self.device, torch.int32)))
        return rows


def bench(subject: Subject, role: Role, id: str, block_size: int | None = None) -> Bench:
    """Opens a session for a layout and a page size, by default the backend's own. ``Refused`` is
    passed on.
    """
    prefix, setting = SETTING[role]
    changes: dict[str, Any] = {setting: id, "needs": frozenset({f"{prefix}:{id}"})}
    if block_size is not None:
        changes["block_size"] = block_size
    deployment = subject.deployment(**changes)
    session = subject.open(deployment)
    ops = offered_ops(session, subject.capabilities)
    private = id not in known_ids(role)
    return Bench(
        session,
        Offered({name: getattr(op, "call", op) for name, op in ops.items()}),
        session.layouts[id] if private else _open_layout(role, id),
        None if private else byte_layout(role, id),
        deployment.block_size,
        subject.torch_device,
        getattr(torch, deployment.dtype),
    )


def known_ids(role: Role) -> tuple[str, ...]:
    """The layouts that the oracle has."""
    return tuple(LATENT_LAYOUTS if role == "latent" else INDEX_LAYOUTS)


def pages_of(cache: KVCache) -> Tensor:
    """uint8 [blocks, bytes of a page]: the bytes of every part, page by page, on the CPU."""
    return torch.cat([to_bytes(part).flatten(1) for part in cache.parts], -1)


def latent_width(layout: KVLayout) -> int:
    """Values of a row that are the latent."""
    return next((field.count for field in layout.fields if field.name == "latent"), LATENT)


def _open_layout(role: Role, id: str) -> KVLayout:
    from ml4core.api.known_layouts import index_layout, latent_layout

    return latent_layout(id) if role == "latent" else index_layout(id)


def _full(like: Tensor, byte: int) -> Tensor:
    size = (*like.shape[:-1], like.shape[-1] * like.element_size())
    return torch.full(size, byte, dtype=torch.uint8, device=like.device).view(like.dtype)
