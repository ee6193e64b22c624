"""The child's side of a probe. The parent starts it, and reads its answer from a file."""

from __future__ import annotations

import faulthandler
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, TypedDict, get_args

from ml4core.api import Backend, Capabilities, Device, DeviceKind, Probe, Refusal, Refused
from ml4core.registry._loading import load_plugin
from ml4core.registry._records import FoundDevice, PluginRecord, ProbeResult
from ml4core.registry._text import describe, one_line


class Job(TypedDict):
    """What the parent asks for; JSON.

    ``path`` is the parent's ``sys.path``, ``deadline`` a value of the monotonic clock, which the
    processes of a machine share.
    """

    path: list[str]
    name: str
    distribution: str
    version: str
    target: str
    deadline: float
    answer: str


def main(job: Job) -> NoReturn:
    """Probe, answer and exit. Past the deadline the stack is dumped, which shows where it hung."""
    faulthandler.enable()
    remaining = max(job["deadline"] - time.monotonic(), 0.001)
    faulthandler.dump_traceback_later(remaining, exit=True)
    record = PluginRecord(job["name"], job["distribution"], job["version"], job["target"])
    result = answer(record)
    Path(job["answer"]).write_text(json.dumps(result.to_json()), "utf-8")
    os._exit(0)  # a vendor library that fails or hangs in its teardown no longer matters


def answer(record: PluginRecord) -> ProbeResult:
    """Load the plugin and ask it. Whatever Python can catch becomes a refusal."""
    try:
        backend = load_plugin(record).backend
    except Refused as refused:
        return ProbeResult("broken", refusals=refused.refusals)
    try:
        priority = backend.priority
        probe = backend.probe()
    except (Exception, SystemExit) as error:
        return _broken(record, f"raised {describe(error)}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        return _broken(record, f"has the priority {priority!r}, which is no integer")
    fault = _malformed(probe)
    if fault:
        return _broken(record, fault)
    refusals = list(probe.refusals)
    found = []
    for device in probe.devices:
        capabilities = _capabilities(record, backend, device)
        if isinstance(capabilities, Capabilities):
            found.append(FoundDevice(device, capabilities))
        else:
            refusals.append(capabilities)
    if found:
        return ProbeResult("ok", tuple(found), tuple(refusals), priority)
    return ProbeResult(
        "broken" if probe.devices else "unavailable", refusals=tuple(refusals), priority=priority
    )


def _broken(record: PluginRecord, reason: str) -> ProbeResult:
    refusal = Refusal(record.name, "probe", f"its probe {reason}")
    return ProbeResult("broken", refusals=(refusal,))


def _malformed(probe: object) -> str:
    """What is wrong with the answer of a probe; "" if nothing."""
    if not isinstance(probe, Probe):
        return f"returned {one_line(repr(probe))}, not a Probe"
    if not all(isinstance(part, tuple | list) for part in (probe.devices, probe.refusals)):
        return f"returned {one_line(repr(probe))}, whose parts are no tuples"
    for device in probe.devices:
        if not isinstance(device, Device):
            return f"returned {one_line(repr(device))} among its devices"
        if fault := _malformed_device(device):
            return fault
    for refusal in probe.refusals:
        if not isinstance(refusal, Refusal):
            return f"returned {one_line(repr(refusal))} among its refusals"
    if not probe.devices and not probe.refusals:
        return "found no device and gave no reason"
    try:
        json.dumps([asdict(refusal) for refusal in probe.refusals])
        json.dumps([FoundDevice(d, Capabilities(frozenset())).to_json() for d in probe.devices])
    except (TypeError, ValueError) as error:
        return f"returned what JSON can't hold: {describe(error)}"
    return ""


def _malformed_device(device: Device) -> str:
    if device.kind not in get_args(DeviceKind):
        kinds = ", ".join(get_args(DeviceKind))
        return f"returned {device.name!r} of kind {device.kind!r}; kinds are {kinds}"
    for field in ("name", "arch", "torch_device"):
        text = getattr(device, field)
        if not isinstance(text, str) or not text:
            return f"returned a device whose {field} is {one_line(repr(text))}; works: a text"
    for field in ("index", "memory_bytes"):
        number = getattr(device, field)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            found = f"returned {device.name!r} whose {field} is {one_line(repr(number))}"
            return f"{found}; works: a whole number from 0"
    return ""


def _capabilities(record: PluginRecord, backend: Backend, device: Device) -> Capabilities | Refusal:
    try:
        answered: object = backend.capabilities(device)
        if isinstance(answered, Capabilities):
            json.dumps(answered.to_json())
            return answered
        why = f"returned {one_line(repr(answered))}"
    except (Exception, SystemExit) as error:
        why = f"raised {describe(error)}"
    return Refusal(record.name, device.name, f"capabilities() {why} for this device")
