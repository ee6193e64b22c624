"""Mutants of what a backend says before it serves: reasons, probes, capabilities."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points

import torch

from ml4core.api import (
    BACKENDS_GROUP,
    CORE_SWITCHES,
    Capabilities,
    Deployment,
    Device,
    Probe,
    Refusal,
    Refused,
    Session,
)
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import Altered, Changed, nothing


def mutants() -> list[Mutant]:
    kinds: Sequence[tuple[str, str, type[Altered], tuple[str, ...]]] = (
        (
            "first-reason",
            "A refusal tells its first reason only.",
            FirstReason,
            ("system.refusal",),
        ),
        ("rank-zero", "Only rank 0 refuses.", RankZero, ("system.refusal",)),
        (
            "refuses-late",
            "A refusal comes after caches have been allocated.",
            RefusesLate,
            ("system.refusal",),
        ),
        (
            "refuses-together",
            "Ranks agree by a collective before they refuse.",
            RefusesTogether,
            ("system.refusal",),
        ),
        (
            "swallows-switches",
            "Keys of --additional-config that it doesn't know are ignored.",
            SwallowsSwitches,
            ("system.refusal[switches]",),
        ),
        (
            "eager-import",
            "Its vendor library is imported when it is found.",
            EagerImport,
            ("plugin.import_light",),
        ),
        (
            "eager-device",
            "The device is initialised when it is found.",
            EagerDevice,
            ("plugin.import_light",),
        ),
        (
            "wordy-priority",
            "Its priority is no integer.",
            WordyPriority,
            ("plugin.metadata",),
        ),
        (
            "fickle-probe",
            "A second probe finds another device.",
            FickleProbe,
            ("plugin.probe",),
        ),
        (
            "fickle-words",
            "Capabilities differ from call to call.",
            FickleWords,
            ("plugin.capabilities",),
        ),
        (
            "nosy-probe",
            "Its probe imports every plugin that is installed.",
            NosyProbe,
            ("system.isolation",),
        ),
        (
            "claims-invariance",
            "It declares the same bits in any batch, and sums in another order.",
            ClaimsInvariance,
            ("model.invariant",),
        ),
    )
    return [Mutant(name, doc, Changed(nothing, kind), dies) for name, doc, kind, dies in kinds]


class FirstReason(Altered):
    def open(self, deployment: Deployment) -> Session:
        try:
            return self.honest.open(deployment)
        except Refused as refused:
            raise Refused(refused.refusals[:1]) from None


class RankZero(Altered):
    def open(self, deployment: Deployment) -> Session:
        try:
            return self.honest.open(deployment)
        except Refused as refused:
            if os.environ.get("RANK", "0") == "0":
                raise
            raise Refused([Refusal(self.name, "rank", "asks rank 0")]) from refused


class RefusesLate(Altered):
    def open(self, deployment: Deployment) -> Session:
        torch.empty(1 << 20, device=deployment.device.torch_device)
        return self.honest.open(deployment)


class RefusesTogether(Altered):
    def open(self, deployment: Deployment) -> Session:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
        return self.honest.open(deployment)


class SwallowsSwitches(Altered):
    def open(self, deployment: Deployment) -> Session:
        known = {
            key: value
            for key, value in deployment.additional_config.items()
            if key in CORE_SWITCHES
        }
        return self.honest.open(replace(deployment, additional_config=known))


class EagerImport(Altered):
    @property
    def priority(self) -> int:
        import sys
        from types import ModuleType

        sys.modules.setdefault("aiter", ModuleType("aiter"))
        return self._priority


class EagerDevice(Altered):
    @property
    def priority(self) -> int:
        """As if a device were there to be initialised."""
        torch.cuda._initialized = True
        return self._priority


class WordyPriority(Altered):
    @property
    def priority(self) -> int:
        return "high"  # type: ignore[return-value]


class FickleProbe(Altered):
    asked = 0

    def probe(self) -> Probe:
        self.asked += 1
        found = self.honest.probe()
        devices = [replace(one, name=f"{one.name} {self.asked}") for one in found.devices]
        return Probe(tuple(devices), found.refusals)


class FickleWords(Altered):
    asked = 0

    def capabilities(self, device: Device) -> Capabilities:
        self.asked += 1
        found = self.honest.capabilities(device)
        if self.asked % 2:
            return found
        return replace(found, features=found.features - {min(found.features)})


class NosyProbe(Altered):
    def probe(self) -> Probe:
        for entry in entry_points(group=BACKENDS_GROUP):
            entry.load()
        return self.honest.probe()


class ClaimsInvariance(Altered):
    def capabilities(self, device: Device) -> Capabilities:
        found = self.honest.capabilities(device)
        return replace(found, features=found.features | {"feature:batch_invariant"})
