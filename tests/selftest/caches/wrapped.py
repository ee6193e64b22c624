"""An honest backend with some ops replaced, and the verdict of one check on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Backend, Capabilities, Deployment, Device, KVCache
from ml4core.cpu import ml4core_backends
from ml4core_conformance.check import Check, Status
from ml4core_conformance.checks import (
    attention,
    layout_tags,
    layouts,
    ops,
    private_layouts,
    written_rows,
)
from ml4core_conformance.judge import judge
from ml4core_conformance.subject import Subject

Op = Callable[..., Any]
Change = Callable[[Op], Op]


class _Session:
    """An honest session with some ops replaced, and what ``more`` says."""

    def __init__(self, inner: Any, changes: Mapping[str, Change], more: Mapping[str, Any]) -> None:
        self._inner = inner
        self.ops = dict(inner.ops)
        for name, change in changes.items():
            self.ops[name] = change(self.ops[name])
        for name, value in more.items():
            setattr(self, name, value(inner) if callable(value) else value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class Wrapped:
    inner: Backend
    changes: Mapping[str, Change]
    more: Mapping[str, Any]
    words: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def priority(self) -> int:
        return self.inner.priority

    def probe(self) -> Any:
        return self.inner.probe()

    def capabilities(self, device: Device) -> Capabilities:
        honest = self.inner.capabilities(device)
        return replace(honest, features=honest.features | self.words)

    def open(self, deployment: Deployment) -> Any:
        known = deployment.needs - self.words
        return _Session(self.inner.open(replace(deployment, needs=known)), self.changes, self.more)


def backend(
    changes: Mapping[str, Change] | None = None,
    words: frozenset[str] = frozenset(),
    **more: Any,
) -> Wrapped:
    return Wrapped(ml4core_backends()[0], changes or {}, more, words)


def checks_by_id() -> dict[str, Check]:
    modules = (attention, layout_tags, layouts, ops, private_layouts, written_rows)
    return {check.id: check for module in modules for check in module.checks()}


CHECKS = checks_by_id()


def verdict(subject: Wrapped, check: str, small: bool = True) -> tuple[Status, str]:
    device = subject.probe().devices[0]
    judged = Subject(subject, device, small=small)  # type: ignore[arg-type]
    try:
        result = judge(judged, CHECKS[check])
    finally:
        judged.close()
    return result.status, result.reason


def dies(subject: Wrapped, check: str, *words: str, small: bool = True) -> None:
    status, reason = verdict(subject, check, small)
    assert status == Status.FAIL, (check, status, reason)
    for word in words:
        assert word in reason


def after(change: Callable[..., Any]) -> Change:
    """The op's results changed."""
    return lambda op: lambda *args: change(*_tuple(op(*args)))


def before(change: Callable[..., tuple[Any, ...]]) -> Change:
    """The op's arguments changed."""
    return lambda op: lambda *args: op(*change(*args))


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def page_off(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Any:
    edge = (slots % cache.block_size == cache.block_size - 1) & (slots > 0)
    return q, cache, torch.where(edge, slots - cache.block_size, slots), lens, scale
