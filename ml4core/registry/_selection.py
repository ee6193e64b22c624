"""Chooses the backend that runs, and tells what became of every other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import pluggy

from ml4core.api import Backend, Capabilities, Device, DeviceKind, Refusal, Refused
from ml4core.registry._discovery import AUTO, discover, find
from ml4core.registry._loading import LoadedPlugin, load_plugin
from ml4core.registry._probing import probe_all
from ml4core.registry._records import (
    BackendReport,
    FoundDevice,
    PassedOver,
    PluginRecord,
    ProbeResult,
)

EMBEDDED = "cpu"
"""The backend that core brings along; ``auto`` takes it last, whatever priority it declares."""

_REAL: DeviceKind = "real"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The backend that runs.

    Attributes:
        plugin: loaded in this process.
        devices: its devices of the kind asked for, in the order of its probe; never empty.
        notes: what its probe holds against other devices.
        trace: under ``auto``, every other installed plugin and why it was passed over.
    """

    plugin: LoadedPlugin
    devices: tuple[FoundDevice, ...]
    notes: tuple[Refusal, ...] = ()
    trace: tuple[PassedOver, ...] = ()

    @property
    def backend(self) -> Backend:
        return self.plugin.backend

    @property
    def manager(self) -> pluggy.PluginManager:
        return self.plugin.manager

    @property
    def device(self) -> Device:
        return self.devices[0].device

    @property
    def capabilities(self) -> Capabilities:
        return self.devices[0].capabilities


def select(
    name: str,
    *,
    device_kind: str | None = None,
    timeout: float | None = None,
    records: Sequence[PluginRecord] | None = None,
) -> Choice:
    """The named backend with its devices, or ``auto``: the first that has one.

    ``auto`` goes by declared priority, then by name, the embedded cpu backend last. Each candidate
    is loaded in a child process; this one imports the chosen one alone.

    Args:
        device_kind: another than ``real`` opens such a device; None takes real ones only.
        timeout: seconds for each probe; see ``probe``.
        records: the plugins to choose from; None takes ``discover()``.

    Raises:
        Refused: with every reason found. A named backend has no substitute.
    """
    kind = _kind(device_kind)
    records = discover() if records is None else records
    if name == AUTO:
        return _first(records, kind, timeout)
    record = find(name, records)
    (result,) = probe_all([record], timeout)
    reasons = _reasons_against(record, result, kind)
    if reasons:
        raise Refused(reasons, what=f"--backend {name}")
    return _chosen(load_plugin(record), result, kind)


def report(
    *, timeout: float | None = None, records: Sequence[PluginRecord] | None = None
) -> list[BackendReport]:
    """Every installed plugin, probed at the same time, each in a child process. Never raises for
    what is wrong with a plugin: its line says so."""
    records = discover() if records is None else records
    sound = [record for record in records if not record.refusals]
    results = iter(probe_all(sound, timeout))
    return [
        BackendReport(
            record,
            ProbeResult("refused", refusals=record.refusals) if record.refusals else next(results),
        )
        for record in records
    ]


def _kind(asked: str | None) -> DeviceKind:
    for kind in get_args(DeviceKind):
        if kind == (_REAL if asked is None else asked):
            return kind  # type: ignore[no-any-return]
    kinds = ", ".join(get_args(DeviceKind))
    refusal = Refusal("core", "device", f"there is no device kind {asked!r}", kinds)
    raise Refused([refusal], what="--additional-config")


def _first(records: Sequence[PluginRecord], kind: DeviceKind, timeout: float | None) -> Choice:
    reports = report(timeout=timeout, records=records)
    passed: dict[PluginRecord, tuple[Refusal, ...]] = {}
    chosen: Choice | None = None
    for each in sorted(reports, key=_order):
        record = each.record
        passed[record] = _reasons_against(record, each.result, kind)
        if passed[record]:
            continue
        if chosen:
            taken = chosen.plugin.record.name
            reason = f"{taken} comes before it: by priority, then by name, {EMBEDDED} last"
            remedy = f"--backend {record.name}"
            passed[record] = (Refusal("core", record.name, reason, remedy),)
            continue
        try:
            chosen = _chosen(load_plugin(record), each.result, kind)
            del passed[record]
        except Refused as refused:  # it loaded in the child, and does not here
            passed[record] = refused.refusals
    if not chosen:
        reasons = [refusal for refusals in passed.values() for refusal in refusals]
        none = Refusal("core", AUTO, "no backend plugin is installed", "pip install ml4core")
        raise Refused(reasons or [none], what=f"--backend {AUTO}")
    for each in reports:
        loud = each.result.state in ("refused", "broken")
        for refusal in passed.get(each.record, ()):
            level = logging.WARNING if loud else logging.INFO
            _logger.log(level, "--backend %s passed over %s: %s", AUTO, each.record, refusal)
    _logger.info("--backend %s took %s", AUTO, chosen.plugin.record)
    trace = tuple(PassedOver(record.name, refusals) for record, refusals in passed.items())
    return replace(chosen, trace=trace)


def _order(candidate: BackendReport) -> tuple[bool, int, str]:
    name = candidate.record.name
    return (name == EMBEDDED, -(candidate.result.priority or 0), name)


def _reasons_against(
    record: PluginRecord, result: ProbeResult, kind: DeviceKind
) -> tuple[Refusal, ...]:
    if not result.devices or any(found.device.kind == kind for found in result.devices):
        return () if result.devices else result.refusals
    kinds = sorted({found.device.kind for found in result.devices})
    found = ", ".join(kinds)
    asking = " or ".join(
        f'--additional-config \'{{"device": "{other}"}}\'' for other in kinds if other != _REAL
    )
    remedy = asking or f"no device kind in --additional-config, for its {_REAL} devices"
    reason = f"has no {kind} device; kinds found: {found}"
    return (*result.refusals, Refusal(record.name, "device", reason, remedy))


def _chosen(plugin: LoadedPlugin, result: ProbeResult, kind: DeviceKind) -> Choice:
    devices = tuple(found for found in result.devices if found.device.kind == kind)
    return Choice(plugin, devices, result.refusals)
