"""The backend under judgement, as checks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ml4core.api import OPS, Backend, Capabilities, Deployment, Device, ModelSpec, Session
from ml4core.registry import PluginRecord
from ml4core_conformance.check import CheckFailed, Measure
from ml4core_conformance.evaluation import Evaluation, evaluate
from ml4core_conformance.offered import offered_ops
from ml4core_conformance.own_checks import harness
from ml4core_conformance.refusing import fields

if TYPE_CHECKING:
    from ml4core_conformance.case import OpCase
    from ml4core_conformance.hookspecs import Harness

T = TypeVar("T")
EXERCISED = ("stage:", "kv:", "index:", "weights:", "act:", "spec:", "feature:")
"""Prefixes of what a step can show. Ops have checks of their own, each."""


@dataclass
class Subject:
    """A backend on one device, with what checks of one unit share.

    Sessions are the backend's own, not guarded by core: what a plugin does wrong is to be seen.

    Attributes:
        backend: what is judged; possibly a mutant.
        device: the device that its probe found.
        seeds: inputs are drawn once for each.
        record: how it was installed; None where a bare object is judged.
        options: ``additional_config`` for every session.
        small: only cases marked ``small`` are to be judged, as the self-test asks.
        measures: what the running check has judged so far.
        exercised: capability words that it has run with so far, of prefixes in ``EXERCISED``.
    """

    backend: Backend
    device: Device
    seeds: tuple[int, ...] = (0,)
    record: PluginRecord | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    small: bool = False
    measures: list[Measure] = field(default_factory=list)
    exercised: set[str] = field(default_factory=set)
    _evaluations: dict[tuple[str, int], Evaluation] = field(default_factory=dict)
    _sessions: list[Session] = field(default_factory=list)
    _shared: dict[str, Any] = field(default_factory=dict)
    _by_needs: dict[frozenset[str], tuple[Session, Mapping[str, Callable[..., Any]]]] = field(
        default_factory=dict
    )

    @cached_property
    def harness(self) -> Harness | None:
        """What the plugin offers for fault injection and the like; None for most."""
        return harness(self.record, self.backend)

    @cached_property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities(self.device)

    def measure(self, measure: Measure) -> None:
        """Keeps a judged number for the report, and raises ``CheckFailed`` if it is too large."""
        self.measures.append(measure)
        if not measure.error <= measure.bound:
            raise CheckFailed(
                f"{measure.what}: error {measure.error:.3g} is above the bound {measure.bound:.3g} "
                f"({measure.ratio:.3g} times) at {measure.where}"
            )

    def exercise(self, words: Iterable[str]) -> None:
        """Notes what the running check has run with, though it doesn't ask for it."""
        self.exercised.update(word for word in words if word.startswith(EXERCISED))

    def deployment(self, model: ModelSpec | None = None, **changes: Any) -> Deployment:
        """A deployment of the device's defaults; ``changes`` are fields of ``Deployment``."""
        defaults = self.capabilities.defaults
        base = Deployment(
            model=model or ModelSpec("conformance", 8, 128, 1e-6, 128, False, ()),
            device=self.device,
            dtype=defaults.get("dtype", "bfloat16"),
            kv_layout=defaults.get("kv", "bf16"),
            index_layout=defaults.get("index", "planar_f32"),
            block_size=int(defaults.get("block_size", "64")),
            max_model_len=4096,
            max_num_seqs=8,
            additional_config=dict(self.options),
        )
        return replace(base, **changes)

    def open(self, deployment: Deployment | None = None) -> Session:
        """A session; closed when the unit ends. ``Refused`` is passed on."""
        session = self.backend.open(deployment or self.deployment())
        self._sessions.append(session)
        return session

    @cached_property
    def session(self) -> Session:
        """The session of ``deployment()`` that checks of ops and layouts share."""
        return self.open()

    @cached_property
    def ops(self) -> Mapping[str, Callable[..., Any]]:
        """Every op that the backend offers or has composed, by name. ``CheckFailed`` for others."""
        return offered_ops(self.session, self.capabilities)

    def session_for(
        self, needs: frozenset[str] = frozenset()
    ) -> tuple[Session, Mapping[str, Callable[..., Any]]]:
        """The session of a deployment with these ``needs``, in the layouts and dtype they name,
        and its ops. One for each set.
        """
        if not needs:
            return self.session, self.ops
        if needs not in self._by_needs:
            session = self.open(self.deployment(**fields(needs)))
            self._by_needs[needs] = session, offered_ops(session, self.capabilities)
        return self._by_needs[needs]

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device.torch_device)

    def evaluate(self, case: OpCase, seed: int) -> Evaluation:
        """The oracle's and the backend's results of one case. Each is made once a unit."""
        key = (case.id, seed)
        if key not in self._evaluations:
            self._evaluations[key] = evaluate(self, case, seed)
        return self._evaluations[key]

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What checks of one unit share, made when it is first asked for."""
        if key not in self._shared:
            self._shared[key] = make()
        found: T = self._shared[key]
        return found

    def close(self) -> None:
        """Ends the unit: drops shared work and closes each session."""
        self._evaluations.clear()
        self._shared.clear()
        self._by_needs.clear()
        for name in ("session", "ops"):
            self.__dict__.pop(name, None)
        while self._sessions:
            self._sessions.pop().close()


def declared(capabilities: Capabilities, op: str) -> bool:
    """Whether an op can be judged: offered, or composed."""
    return op in OPS and not capabilities.missing({f"op:{op}"})
