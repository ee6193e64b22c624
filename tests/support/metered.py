"""A device with a fixed memory that counts what it is asked for, over the cpu backend's session."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ml4core.api import (
    DRAFT_GROUP,
    Capture,
    Deployment,
    KVCache,
    KVLayout,
    MemoryFigures,
    StepBuckets,
    StepShape,
    Weight,
)
from ml4core.registry import Choice

MIB = 2**20
GIB = 2**30
ROW_BYTES = 64 * 1024
"""What a row of a step takes while it runs."""
GRAPH_BYTES = 3 * MIB
FIRST_GRAPH_BYTES = 5 * MIB


@dataclass
class Meter:
    """The device's memory. ``total`` and the like are set before an engine opens.

    Attributes:
        others: what other processes have.
        cached: what the allocator keeps for later until ``release``.
        driver: graphs and the runtime.
        pieces: what the allocator can't give back, as it lies between what is in use.
    """

    total: int = 256 * MIB
    others: int = 6 * MIB
    tensors: int = 0
    cached: int = 0
    driver: int = 0
    pieces: int = 0
    peak: int = 0
    released: int = 0

    def take(self, nbytes: int) -> None:
        """Raises as torch does where there is too little."""
        if nbytes > self.figures().free + self.cached:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / MIB:.2f} MiB. GPU 0 is full"
            )
        self.cached = max(0, self.cached - nbytes)
        self.tensors += nbytes
        self.peak = max(self.peak, self.tensors)

    def give(self, nbytes: int) -> None:
        self.tensors -= nbytes
        self.cached += nbytes

    def figures(self) -> MemoryFigures:
        held = self.tensors + self.cached
        free = self.total - self.others - self.driver - held
        return MemoryFigures(self.total, free, self.tensors, held, self.peak)

    def reset_peak(self) -> None:
        self.peak = self.tensors

    def release(self) -> None:
        self.released += 1
        self.cached = self.pieces


@dataclass
class Graphs:
    """Runs a shape once as it is, and captures it in its second call."""

    meter: Meter
    buckets: StepBuckets
    captures: list[Capture] = field(default_factory=list)
    ran: list[StepShape] = field(default_factory=list)
    drops: int = 0

    def compile(self, step: Callable[..., Any], shape: StepShape) -> Callable[..., Any]:
        calls = 0

        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            self.ran.append(shape)
            captured = self.captures_shape(shape) and calls > 1
            if captured and calls == 2:
                nbytes = GRAPH_BYTES if self.captures else FIRST_GRAPH_BYTES
                if nbytes > self.meter.figures().free:
                    raise torch.OutOfMemoryError("CUDA out of memory while capturing")
                self.meter.driver += nbytes
                self.captures.append(Capture(shape, 0.5, nbytes, 1))
            rows = 0 if captured else shape.rows
            self.meter.take(rows * ROW_BYTES)
            try:
                return step(*args)
            finally:
                self.meter.give(rows * ROW_BYTES)

        return call

    def captures_shape(self, shape: StepShape) -> bool:
        whole = [group for group, _ in shape.pages] != [DRAFT_GROUP]
        return whole and not shape.prefill.rows and bool(self.buckets.decode)

    def drop(self) -> None:
        self.drops += 1
        self.meter.driver -= sum(one.nbytes for one in self.captures)
        self.captures.clear()

    def eager_break(self, function: Any) -> Any:
        return function


class Metered:
    """A session that tells of its memory."""

    def __init__(self, inner: Any, deployment: Deployment, meter: Meter, spoils: set[str]) -> None:
        self._inner = inner
        self.memory = meter
        self._spoils = spoils
        sizes = deployment.cudagraph_capture_sizes or (1, 2, 4)
        self.step_buckets = None
        if not deployment.enforce_eager:
            pages = -(-(deployment.max_model_len + 8) // deployment.block_size)
            logits = tuple(range(1, 65))
            self.step_buckets = StepBuckets(sizes, sizes, pages=(2, pages), logits=logits)
        self.executor = Graphs(meter, self.step_buckets or StepBuckets())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare_weights(self, weights: Any, layer: Any, part: str = "decoder") -> Any:
        found = self._inner.prepare_weights(weights, layer, part)
        for storage in _storages(found):
            self.memory.take(storage.nbytes())
            weakref.finalize(storage, self.memory.give, storage.nbytes())
        return found

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        nbytes = blocks * block_size * layout.bytes_per_token
        if "caches" in self._spoils:
            nbytes += nbytes // 20
        self.memory.take(nbytes)
        cache: KVCache = self._inner.alloc_kv(layout, blocks, block_size)
        weakref.finalize(cache.parts[0].untyped_storage(), self.memory.give, nbytes)
        return cache


def _storages(weights: Mapping[str, Any]) -> list[Any]:
    """Memory of weights, once each."""
    found = {}
    for value in weights.values():
        for part in value.parts.values() if isinstance(value, Weight) else (value,):
            storage = part.untyped_storage()
            found[storage.data_ptr()] = storage
    return list(found.values())


def metered(
    plain: Choice,
    meter: Meter,
    monkeypatch: pytest.MonkeyPatch,
    spoils: set[str] | None = None,
    sessions: list[Metered] | None = None,
) -> Choice:
    """The choice of a backend whose device tells of its memory and captures graphs. ``spoils``:
    what it does wrong, ``caches`` that are larger than asked for. ``sessions`` gets those that are
    opened.
    """
    open_plain = plain.backend.open
    features = plain.capabilities.features | {"feature:graph_capture"}
    capabilities = replace(plain.capabilities, features=features)

    def opened(self: Any, deployment: Deployment) -> Metered:
        session = Metered(open_plain(deployment), deployment, meter, spoils or set())
        if sessions is not None:
            sessions.append(session)
        return session

    monkeypatch.setattr(type(plain.backend), "open", opened)
    monkeypatch.setattr(type(plain.backend), "capabilities", lambda self, device: capabilities)
    return replace(plain, devices=(replace(plain.devices[0], capabilities=capabilities),))
