"""What the registry knows about plugins, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from ml4core.api import Capabilities, Device, Refusal

State = Literal["ok", "unavailable", "refused", "broken"]
"""ok: has a device. unavailable: loads, but has none. refused: never loaded, for what its metadata
says. broken: does not load, or its probe raised, hung or died."""


@dataclass(frozen=True)
class PluginRecord:
    """One entry point of an installed distribution, known without importing it.

    Attributes:
        name: the entry point's name, the word of ``--backend``.
        target: the entry point's value: ``module`` or ``module:attribute``.
        api: lowest and highest API version that it states; None if missing or malformed.
        refusals: why it may not be loaded; empty if it may.
    """

    name: str
    distribution: str
    version: str
    target: str
    api: tuple[int, int] | None = None
    refusals: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} (from {self.distribution} {self.version})"

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "target": self.target,
            "api": f"{self.api[0]}-{self.api[1]}" if self.api else None,
        }


@dataclass(frozen=True)
class FoundDevice:
    """A device of a probe, and what the backend says that it can do there."""

    device: Device
    capabilities: Capabilities

    def to_json(self) -> dict[str, object]:
        device = self.device
        return {
            "kind": device.kind,
            "name": device.name,
            "arch": device.arch,
            "torch_device": device.torch_device,
            "index": device.index,
            "memory_bytes": device.memory_bytes,
            "details": dict(device.details),
            "capabilities": self.capabilities.to_json(),
        }


@dataclass(frozen=True)
class ProbeResult:
    """The answer of a plugin, or why there is none.

    Attributes:
        refusals: why it can't serve; with devices, why others can't.
        priority: as declared; None if it was never learnt.
    """

    state: State
    devices: tuple[FoundDevice, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    priority: int | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "state": self.state,
            "priority": self.priority,
            "devices": [found.to_json() for found in self.devices],
            "refusals": [asdict(refusal) for refusal in self.refusals],
        }


@dataclass(frozen=True)
class BackendReport:
    """One line of ``ml4 backends``."""

    record: PluginRecord
    result: ProbeResult

    def to_json(self) -> dict[str, object]:
        return self.record.to_json() | self.result.to_json()


class PassedOver(NamedTuple):
    """A backend that ``auto`` did not take, and why."""

    name: str
    refusals: tuple[Refusal, ...]
