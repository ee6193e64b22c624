"""Backends whose capabilities say more, or less, than is there."""

from __future__ import annotations

from dataclasses import replace

from ml4core.api import Capabilities, Deployment, Device, Refusal, Refused, Session
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import Altered, AlteredSession, Changed, nothing

_CLAIMS = ("act:nvfp4", "act:mxfp4", "act:fp8_tensor", "act:fp8_block", "act:fp32")
"""Words of which no device has all."""
_HIDDEN = ("weights:bf16", "weights:fp8_block", "act:bf16", "act:fp32")


def mutants() -> list[Mutant]:
    return [
        Mutant(
            "claims-a-format",
            "It declares a format that it then refuses.",
            Changed(nothing, Claims),
            ("caps.over[formats]",),
        ),
        Mutant(
            "claims-an-op",
            "It declares an op that nobody gives.",
            Changed(without_topk, ClaimsOp),
            ("caps.over[parts]",),
        ),
        Mutant(
            "hides-a-format",
            "It serves a format that it doesn't declare.",
            Changed(nothing, HidesFormat),
            ("caps.under[words]",),
        ),
        Mutant(
            "hides-an-op",
            "It offers an op that it doesn't declare.",
            Changed(own_topk, HidesOp),
            ("caps.under[parts]",),
        ),
        Mutant(
            "refuses-in-silence",
            "A refusal doesn't name what is missing.",
            Changed(nothing, Silent),
            ("caps.under[words]",),
        ),
    ]


class Claims(Altered):
    """Declares one format more. What it opens was altered as ever."""

    def capabilities(self, device: Device) -> Capabilities:
        found = super().capabilities(device)
        lacking = [word for word in _CLAIMS if word not in found]
        return replace(found, features=found.features | {*lacking[:1]})


class ClaimsOp(Altered):
    """Declares top-k, which it takes from its sessions and doesn't have composed either."""

    def capabilities(self, device: Device) -> Capabilities:
        found = super().capabilities(device)
        return replace(found, features=(found.features | {"op:topk"}) - {"feature:compose"})


class HidesFormat(Altered):
    """Leaves out a word of what it serves."""

    def capabilities(self, device: Device) -> Capabilities:
        found = super().capabilities(device)
        served = [word for word in _HIDDEN if word in found]
        return replace(found, features=found.features - {*served[:1]})


class HidesOp(Altered):
    """Leaves out an op of its sessions."""

    def capabilities(self, device: Device) -> Capabilities:
        found = super().capabilities(device)
        return replace(found, features=found.features - {"op:topk"})


class Silent(Altered):
    """Refuses for a reason that names no word."""

    def open(self, deployment: Deployment) -> Session:
        try:
            return super().open(deployment)
        except Refused:
            raise Refused([Refusal(self.name, "deployment", "isn't served")]) from None


def without_topk(session: AlteredSession) -> None:
    session.ops = {name: op for name, op in session.ops.items() if name != "topk"}


def own_topk(session: AlteredSession) -> None:
    session.ops["topk"] = session.honest["topk"]
