"""A plugin before it is opened: light to find, quick to probe, and true to its metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any, get_args

from ml4core.api import SUPPORTED_API_VERSIONS, Capabilities, Device
from ml4core.api.backend import DeviceKind
from ml4core.api.capabilities import check_words
from ml4core.registry import load_plugin
from ml4core_conformance import hookspecs
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.rigs.child import VENDORS, ChildFailed, ask
from ml4core_conformance.subject import Subject

_OURS = "ml4core_conformance_"
PROBE_S = 30.0
"""Seconds that core gives a probe by default."""
LIGHT_S = 5.0
"""Seconds of a core that finding a plugin may take: its module and its object, no probe."""


def checks() -> list[Check]:
    return [
        Check(
            family,
            "plugin",
            run,
            doc,
            unit=family,
            timeout_s=180.0,
        )
        for family, run, doc in (
            (
                "plugin.import_light",
                import_light,
                "Finding the plugin and reading its name and priority loads no vendor library, "
                "initialises no device and is quick: else `ml4 backends` pays for every plugin.",
            ),
            (
                "plugin.metadata",
                metadata,
                "The backend is called as its entry point, its priority is an integer, its "
                "distribution states an API range that core serves, and it implements no hook "
                "that nobody calls.",
            ),
            (
                "plugin.probe",
                probe,
                "A probe ends in time, answers the same twice, names its devices in full and "
                "gives a reason where it has none.",
            ),
            (
                "plugin.capabilities",
                capabilities,
                "Capabilities depend on the device alone, are words of the vocabulary, and go "
                "through JSON unchanged.",
            ),
        )
    ]


def _asked(question: str, subject: Subject, limit_s: float) -> dict[str, Any]:
    try:
        return ask(question, subject.backend, limit_s=limit_s)
    except ChildFailed as failure:
        raise CheckFailed(str(failure)) from None


def import_light(subject: Subject) -> None:
    found = _asked("register", subject, 60.0)
    if found["vendors"]:
        raise CheckFailed(
            f"finding the plugin loads {', '.join(found['vendors'])}; import it inside of "
            f"functions. Watched are {', '.join(VENDORS)}"
        )
    if found["device"]:
        raise CheckFailed(f"finding the plugin initialises the device ({found['device']})")
    if found["seconds"] > LIGHT_S:
        raise CheckFailed(
            f"finding the plugin takes {found['seconds']:.1f} s, {LIGHT_S:g} s at most; it loads "
            f"{', '.join(found['modules'])}"
        )


def metadata(subject: Subject) -> None:
    found = _asked("register", subject, 60.0)
    lacking = [name for name, there in found["members"].items() if not there]
    if lacking:
        raise CheckFailed(f"the backend lacks {', '.join(lacking)}")
    priority = found["priority"]
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise CheckFailed(f"priority is {priority!r}; it must be an integer")
    record = subject.record
    if record is None:
        return  # a bare object has no distribution whose metadata could be wrong
    if found["name"] != record.name:
        raise CheckFailed(
            f"the backend is called {found['name']!r}, its entry point {record.name!r}"
        )
    if record.api is None:
        raise CheckFailed(f"{record.distribution} states no API range in its keywords")
    low, high = record.api
    if not any(low <= version <= high for version in SUPPORTED_API_VERSIONS):
        served = ", ".join(map(str, sorted(SUPPORTED_API_VERSIONS)))
        raise CheckFailed(f"{record.distribution} supports API {low}-{high}; core serves {served}")
    plugin = load_plugin(record)  # refuses unknown hooks, which is raised as it is
    mine = plugin.manager.get_hookcallers(plugin.manager.get_plugin(record.name)) or []
    unheard = [
        caller.name
        for caller in mine
        if caller.name.startswith(_OURS) and not hasattr(hookspecs, caller.name)
    ]
    if unheard:
        known = ", ".join(name for name in vars(hookspecs) if name.startswith(_OURS))
        raise CheckFailed(f"nobody calls {', '.join(unheard)}; the suite's hooks are {known}")


def probe(subject: Subject) -> None:
    first, second = _asked("probe", subject, PROBE_S)["probes"]
    if first["kind"] != "Probe":
        raise CheckFailed(f"probe() answers a {first['kind']}, not a Probe")
    if not first["devices"] and not first["refusals"]:
        raise CheckFailed("probe() finds no device and gives no reason")
    for device in first["devices"]:
        for field in ("kind", "name", "arch", "torch_device"):
            if not isinstance(device[field], str) or not device[field]:
                raise CheckFailed(f"probe() gives a device whose {field} is {device[field]!r}")
        if device["kind"] not in get_args(DeviceKind):
            raise CheckFailed(f"probe() gives a device of kind {device['kind']!r}")
    names = [[device["name"] for device in answer["devices"]] for answer in (first, second)]
    if names[0] != names[1]:
        raise CheckFailed(f"two probes find different devices: {names[0]}, then {names[1]}")


def capabilities(subject: Subject) -> None:
    device = subject.device
    before = json.dumps(asdict(device), default=str)
    answers = [subject.backend.capabilities(device) for _ in range(2)]
    answers.append(subject.backend.capabilities(replace(device)))
    for answer in answers:
        if not isinstance(answer, Capabilities):
            raise CheckFailed(f"capabilities() answers a {type(answer).__name__}")
        check_words(answer.features)
    texts = [json.dumps(answer.to_json(), sort_keys=True) for answer in answers]
    if len(set(texts)) > 1:
        raise CheckFailed("capabilities() of one device differ from call to call")
    if json.dumps(asdict(device), default=str) != before:
        raise CheckFailed("capabilities() changes the device that it is given")
    held = json.loads(texts[0])
    again = Capabilities(frozenset(held["features"]), held["defaults"], held["limits"])
    if again.to_json() != answers[0].to_json():
        raise CheckFailed("capabilities() don't go through JSON unchanged")
    _check_device(device)


def _check_device(device: Device) -> None:
    import torch

    try:
        torch.device(device.torch_device)
    except (RuntimeError, TypeError) as error:
        raise CheckFailed(f"torch knows no device {device.torch_device!r}: {error}") from None
