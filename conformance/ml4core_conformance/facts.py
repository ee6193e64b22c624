"""Finds what is to be judged, and gathers what a result says beside its checks."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ml4core.api import Backend, Capabilities, Device
from ml4core.registry import FoundDevice, PluginRecord, describe, find, probe
from ml4core_conformance.check import Check
from ml4core_conformance.own_checks import told_checks
from ml4core_conformance.results import CapabilityFacts, DeviceFacts, GitFacts, PluginFacts
from ml4core_conformance.target import NO_DEVICE, Target

_LIBRARIES = ("torch", "numpy", "triton", "pluggy", "safetensors", "transformers")
_DISTRIBUTION = "ml4core-conformance"
_COMMIT = "ML4_SOURCE_COMMIT"
"""Variable: the commit, 40 hex digits, of a copy of the sources that has no .git."""


@dataclass(frozen=True)
class Found:
    """What a run is to judge.

    Attributes:
        absent: why the backend has no device here, where the target's is ``NO_DEVICE``.
        own: the checks that the plugin adds, as data.
    """

    target: Target
    plugin: PluginFacts
    device: DeviceFacts
    capabilities: CapabilityFacts
    absent: str = ""
    own: tuple[Check, ...] = ()

    @property
    def checks(self) -> tuple[Check, ...]:
        """The suite's, and the plugin's own."""
        return (*self.target.source(), *self.own)


def find_plugin(name: str, *, device_kind: str = "real", **more: Any) -> Found:
    """The installed backend of that name, on its first device of that kind. It is probed in a
    process of its own, and not imported here.

    ``more`` are fields of ``Target``. Raises ``Refused`` for a name that nobody has and for a
    plugin that its metadata forbids to load.
    """
    record = find(name)
    answer = probe(record)
    device, capabilities, absent = _first(answer.devices, device_kind, name)
    if answer.refusals and absent:
        absent = "; ".join(map(str, answer.refusals))
    target = Target(device, record=record, options=_options(device_kind), **more)
    own = () if answer.state == "broken" else told_checks(record)
    return Found(target, _plugin(record), _device(device), capabilities, absent, own)


def find_object(backend: Backend, *, device_kind: str = "real", **more: Any) -> Found:
    """A bare backend, on the first device of that kind. Its probe runs in this process."""
    name = str(backend.name)
    found: list[FoundDevice] = []
    try:
        answer = backend.probe()
        found = [FoundDevice(each, backend.capabilities(each)) for each in answer.devices]
        told = "; ".join(map(str, answer.refusals))
    except (Exception, SystemExit) as error:
        told = describe(error)
    device, capabilities, absent = _first(found, device_kind, name)
    target = Target(device, backend=backend, options=_options(device_kind), **more)
    facts = PluginFacts(name, target=f"{type(backend).__module__}:{type(backend).__qualname__}")
    return Found(target, facts, _device(device), capabilities, (told or absent) if absent else "")


def created() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def libraries(plugin: PluginFacts) -> dict[str, str]:
    """Versions of Python, of the libraries that core stands on, and of those that the plugin's
    distribution requires.
    """
    names = [*_LIBRARIES, *_required(plugin.distribution)]
    found = {name: version_of(name) for name in dict.fromkeys(names)}
    return {"python": platform.python_version(), "platform": platform.platform()} | {
        name: number for name, number in found.items() if number
    }


def checkouts(plugin: PluginFacts) -> dict[str, GitFacts]:
    """By distribution, the state of the checkout that it runs from; installed ones have none, but
    what ``ML4_SOURCE_COMMIT`` says. ``ValueError`` if that is no commit.
    """
    modules = {_DISTRIBUTION: __package__ or ""}
    if plugin.target:
        modules.setdefault(plugin.distribution or plugin.backend, plugin.target.partition(":")[0])
    states = {name: _git(module) for name, module in modules.items()}
    return {name: state for name, state in states.items() if state}


def _first(
    devices: Iterable[FoundDevice], kind: str, name: str
) -> tuple[Device, CapabilityFacts, str]:
    devices = list(devices)
    for found in devices:
        if found.device.kind == kind:
            return found.device, _capabilities(found.capabilities), ""
    kinds = sorted({found.device.kind for found in devices})
    ways = ", ".join(f"--device {each}" for each in kinds if each != kind)
    absent = f"{name} has no {kind} device; " + (f"works: {ways}" if ways else "it found none")
    return NO_DEVICE, CapabilityFacts(), absent


def _capabilities(capabilities: Capabilities) -> CapabilityFacts:
    return CapabilityFacts.of(capabilities.to_json())


def _options(device_kind: str) -> Mapping[str, Any]:
    return {} if device_kind == "real" else {"device": device_kind}


def _plugin(record: PluginRecord) -> PluginFacts:
    api = f"{record.api[0]}-{record.api[1]}" if record.api else ""
    return PluginFacts(record.name, record.distribution, record.version, record.target, api)


def _device(device: Device) -> DeviceFacts:
    details = {str(key): str(value) for key, value in device.details.items()}
    driver = next((value for key, value in details.items() if "driver" in key.lower()), "")
    kind: Any = "none" if device == NO_DEVICE else device.kind
    torch_device = "" if device == NO_DEVICE else device.torch_device
    return DeviceFacts(
        kind, device.name, device.arch, torch_device, device.memory_bytes, driver, details
    )


def _required(name: str) -> list[str]:
    """Names of the distributions that a plugin's requires, extras left out."""
    try:
        lines = (distribution(name).requires or []) if name else []
    except PackageNotFoundError:
        return []
    names = [re.match(r"[A-Za-z0-9._-]+", line) for line in lines if "extra ==" not in line]
    return [match[0] for match in names if match]


def _git(module: str) -> GitFacts | None:
    """The checkout that tracks a module's file, or what the variable says; None without."""
    try:
        spec = find_spec(module.partition(".")[0])  # the top package alone: imports nothing
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    file = Path(spec.origin)
    if _ask_git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return _told_commit()
    commit = _ask_git(file.parent, "rev-parse", "HEAD")
    changes = _ask_git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else GitFacts(commit.strip(), bool((changes or "").strip()))


def _told_commit() -> GitFacts | None:
    commit = os.environ.get(_COMMIT, "")
    if not commit:
        return None
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"{_COMMIT}={commit!r} is no commit; works: 40 hex digits, as of git")
    return GitFacts(commit, dirty=False)


def _ask_git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
