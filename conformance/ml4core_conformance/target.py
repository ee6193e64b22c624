"""What a run judges: a plugin or a backend object, on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ml4core.api import Backend, Deployment, Device, Refused
from ml4core.registry import PluginRecord, load_plugin
from ml4core_conformance.catalog import all_checks
from ml4core_conformance.check import Check, slowness
from ml4core_conformance.device_state import DeviceState
from ml4core_conformance.own_checks import resolved
from ml4core_conformance.subject import Subject

NO_DEVICE = Device("fake", "no device", "none", "cpu")
"""Stands for the device where the backend finds none, so that checks which need none can run."""

Source = Callable[[], Iterable[Check]]
"""A function of a module that lists checks: worker processes call it too."""


@dataclass(frozen=True)
class Target:
    """A backend on a device. Worker processes get it pickled, and load the plugin themselves.

    Attributes:
        device: ``NO_DEVICE`` if the backend found none.
        record: the installed plugin; None where ``backend`` is judged.
        backend: a bare object, for backends that no distribution offers.
        wrap: makes a mutant of the honest backend; a function or instance of a module.
        seeds, options, small: as in ``Subject``.
        source: where the checks come from.
        state: tells whether the device still works for a process.
    """

    device: Device
    record: PluginRecord | None = None
    backend: Backend | None = None
    wrap: Callable[[Backend], Backend] | None = None
    seeds: tuple[int, ...] = (0,)
    options: Mapping[str, Any] = field(default_factory=dict)
    small: bool = False
    source: Source = all_checks
    state: DeviceState = field(default_factory=DeviceState)

    @property
    def name(self) -> str:
        return self.record.name if self.record else str(getattr(self.backend, "name", "?"))

    def limit(self, check: Check) -> float:
        """Seconds that a check may take on this device."""
        return check.timeout_s * slowness(self.device)

    def load(self) -> Backend:
        """The backend, in this process. One that can't be loaded says so at every call."""
        if self.record is None:
            assert self.backend is not None, "a target has a record or a backend"
            backend = self.backend
        else:
            try:
                backend = load_plugin(self.record).backend
            except Refused as refused:
                return Unloadable(self.record.name, refused)
        return self.wrap(backend) if self.wrap else backend

    def suite(self) -> Mapping[str, Check]:
        """The suite's checks, by id."""
        return {check.id: check for check in self.source()}

    def checks(self, ids: Iterable[str], suite: Mapping[str, Check]) -> Sequence[Check]:
        """The checks of these ids, of the suite and of the plugin, to be run in this process."""
        return resolved(ids, self.record, suite)

    def subject(self, backend: Backend) -> Subject:
        return Subject(
            backend,
            self.device,
            seeds=self.seeds,
            record=self.record,
            options=self.options,
            small=self.small,
        )


class Unloadable:
    """A plugin that can't be loaded. Its name is known from its metadata; all else raises why."""

    priority = 0

    def __init__(self, name: str, refused: Refused) -> None:
        self.name = name
        self.refused = refused

    def probe(self) -> NoReturn:
        raise self.refused

    def capabilities(self, device: Device) -> NoReturn:
        raise self.refused

    def open(self, deployment: Deployment) -> NoReturn:
        raise self.refused
