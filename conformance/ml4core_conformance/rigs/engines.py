"""Whole engines on a subject that need not be installed, and backends that are seen at work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any
from weakref import ReferenceType, ref

import pluggy
import torch

from ml4core import registry
from ml4core.api import (
    PROJECT,
    Backend,
    Capabilities,
    Deployment,
    Device,
    Fault,
    KVCache,
    KVLayout,
    Probe,
    Session,
    hookspecs,
)
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.dspark import draft_spec
from ml4core.models.dspark_weights import expected_draft_tensors
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded import seed_checkpoint
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from ml4core_conformance import tiny
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.model import ModelOracle
from ml4core_conformance.subject import Subject

Wrap = Callable[[Backend], Backend]


MTP: Mapping[str, Any] = MappingProxyType(
    {
        "n_layers": 2,
        "depth": 3,
        "sliding_window": 12,
        "markov_rank": 32,
        "hidden_dim": 192,
    }
)
"""The drafter of a tiny model, as in params.json; its taps depend on the count of layers."""


@contextmanager
def checkpoint(drafter: bool = False, **changes: Any) -> Iterator[Path]:
    """A folder with the tiny model in fp32; ``changes`` are fields of ``SeededConfig``."""
    params = replace(tiny.CONFIG, **changes).params()
    with TemporaryDirectory(prefix="ml4-tiny-") as name:
        folder = seed_checkpoint(Path(name) / "model", params, format="fp32")
        yield _with_drafter(folder, Path(name) / "drafting", params) if drafter else folder


def _with_drafter(source: Path, folder: Path, params: Mapping[str, Any]) -> Path:
    """A copy of a checkpoint that has a drafter too."""
    last = params["n_layers"] - 1
    taps = sorted({1, (last + 1) // 2, last})
    opened, params = Checkpoint.open(source), {**params, "mtp": {**MTP, "target_layers": taps}}
    draft = draft_spec(build_model_spec(params))
    with CheckpointWriter(folder) as writer:
        writer.add_json("params.json", json.loads(json.dumps(params)))
        for name in opened.tensors:
            writer.add(name, opened.read(name))
        for name, entry in expected_draft_tensors(draft, own_frequencies=False).items():
            shape = entry.shapes[0]
            values = Draw(0, name).normal(*shape) * shape[-1] ** -0.5
            writer.add(name, 1 + 0.1 * values if entry.kind == "vector" else values)
        writer.add_file("tekken.json", (source / "tekken.json").read_bytes())
    return folder


def oracle_of(folder: Path, **options: Any) -> ModelOracle:
    """The model of a folder in fp64; ``options`` as in ``ModelOracle``."""
    opened = Checkpoint.open(folder)
    spec = load_model_spec(opened)
    (_, top), *layers = load_layers(opened, spec, torch.float32)
    return ModelOracle(spec, top, [weights for _, weights in layers], **options)


def choice_of(subject: Subject, wrap: Wrap | None = None, *plugins: object) -> registry.Choice:
    """The subject as the registry would choose it; ``plugins`` have hooks that core calls."""
    backend = subject.backend if wrap is None else wrap(subject.backend)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    if subject.record is not None and wrap is None:
        manager = registry.load_plugin(subject.record).manager
    for plugin in plugins:
        manager.register(plugin)
    record = subject.record or registry.PluginRecord(backend.name, "not installed", "0", "none")
    found = registry.FoundDevice(subject.device, subject.capabilities)
    return registry.Choice(registry.LoadedPlugin(record, backend, manager), (found,))


@contextmanager
def engine(
    subject: Subject,
    folder: Path,
    wrap: Wrap | None = None,
    plugins: Sequence[object] = (),
    sequences: int = 8,
    **flags: Any,
) -> Iterator[Engine]:
    """An engine on the subject; closed at the end."""
    args = EngineArgs(str(folder), **{"max_model_len": 256, "max_num_seqs": 8, **flags})
    opened = open_engine(args, choice=choice_of(subject, wrap, *plugins), sequences=sequences)
    subject.exercise(opened.deployment.needs)
    try:
        yield opened
    finally:
        opened.close()


@dataclass
class Log:
    """What was asked of a watched backend.

    Attributes:
        opened: sessions that were opened.
        allocated: calls of ``alloc_kv``.
        prepared: calls of ``prepare_weights``.
    """

    opened: int = 0
    allocated: int = 0
    prepared: int = 0
    _caches: list[ReferenceType[KVCache]] = field(default_factory=list)

    @property
    def caches(self) -> list[KVCache]:
        """Those that are still held: the ones that a start tries its steps with are not."""
        return [cache for one in self._caches if (cache := one()) is not None]

    def add(self, cache: KVCache) -> None:
        self.allocated += 1
        self._caches.append(ref(cache))


class Watched:
    """A backend with a log of what is asked of its sessions, which may be told to fail.

    Attributes:
        fault: given a count of calls, the fault that the session tells of; None for its own.
    """

    def __init__(
        self, backend: Backend, log: Log, fault: Callable[[int], Fault | None] | None = None
    ) -> None:
        self._backend = backend
        self.log = log
        self.fault = fault
        self.name = backend.name
        self.priority = backend.priority

    def probe(self) -> Probe:
        return self._backend.probe()

    def capabilities(self, device: Device) -> Capabilities:
        return self._backend.capabilities(device)

    def open(self, deployment: Deployment) -> Session:
        session = self._backend.open(deployment)
        self.log.opened += 1
        return _WatchedSession(session, self)  # type: ignore[return-value]


class _WatchedSession:
    def __init__(self, session: Session, owner: Watched) -> None:
        self.inner = session
        self._owner = owner
        self._asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        cache = self.inner.alloc_kv(layout, blocks, block_size)
        self._owner.log.add(cache)
        return cache

    def prepare_weights(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        self._owner.log.prepared += 1
        return self.inner.prepare_weights(*args, **kwargs)

    def fault(self) -> Fault | None:
        self._asked += 1
        told = self._owner.fault(self._asked) if self._owner.fault else None
        return told or self.inner.fault()
