"""Every "no" carries a reason, and all reasons are raised at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ml4core.api.capabilities import Capabilities
    from ml4core.api.deployment import Deployment


@dataclass(frozen=True, order=True)
class Refusal:
    """One reason against a device, a deployment or a provider.

    Attributes:
        source: who refuses, e.g. ``"core"`` or a plugin's name.
        subject: the flag, capability, library or device in question.
        reason: what was found and why it doesn't do, in one sentence.
        remedy: what would work; empty if nothing would.
    """

    source: str
    subject: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"[{self.source}] {self.subject}: {self.reason}"
        return f"{text} (works: {self.remedy})" if self.remedy else text


class Refused(Exception):
    """A deployment that a backend can't serve, with every reason.

    The reasons are sorted and unique, so that each rank prints the same list.
    """

    def __init__(self, refusals: Iterable[Refusal], what: str = "this deployment") -> None:
        self.refusals: tuple[Refusal, ...] = tuple(sorted(set(refusals)))
        if not self.refusals:
            raise ValueError("Refused needs at least one Refusal")
        self.what = what
        lines = "\n".join(f"  - {refusal}" for refusal in self.refusals)
        count = len(self.refusals)
        super().__init__(f"{what} is refused for {count} reason{'s' * (count > 1)}:\n{lines}")


def undeclared(
    needs: Iterable[str], capabilities: Capabilities, source: str
) -> tuple[Refusal, ...]:
    """A reason for each needed word that isn't declared; its subject is the word."""
    return tuple(_undeclared(word, capabilities, source) for word in capabilities.missing(needs))


def unknown_switches(
    deployment: Deployment, backend: str, known: Collection[str] = ()
) -> tuple[Refusal, ...]:
    """A reason for each key of ``additional_config`` that nothing reads: neither core's nor the
    backend's name, and within the object under that name none of ``known``.
    """
    from ml4core.api.deployment import CORE_SWITCHES

    given, flag = deployment.additional_config, "--additional-config"
    ours = [*CORE_SWITCHES, backend] if known else list(CORE_SWITCHES)
    reason = f"nothing of backend {backend} reads this key"
    found = [
        Refusal(backend, f"{flag} {key}", reason, ", ".join(ours))
        for key in given
        if key not in CORE_SWITCHES and key != backend
    ]
    own = given.get(backend, {})
    if not isinstance(own, Mapping):
        found.append(Refusal(backend, f"{flag} {backend}", f"{own!r} is no JSON object"))
        return tuple(found)
    works = ", ".join(known) or f"leave it out: backend {backend} has no switches"
    return (
        *found,
        *(
            Refusal(backend, f"{flag} {backend}.{key}", reason, works)
            for key in own
            if key not in known
        ),
    )


def refuse_missing(
    deployment: Deployment,
    capabilities: Capabilities,
    backend: str,
    switches: Collection[str] = (),
) -> None:
    """Raises ``Refused`` that names each needed word which isn't declared, and each key of
    ``additional_config`` that nothing reads; returns if there is none. For a backend's ``open`` to
    begin with: what is undeclared is refused whoever asks.

    Args:
        switches: the keys that the backend reads of the object under its name.
    """
    reasons = (
        *undeclared(deployment.needs, capabilities, backend),
        *unknown_switches(deployment, backend, switches),
    )
    if reasons:
        raise Refused(reasons, what=f"--backend {backend}")


def _undeclared(word: str, capabilities: Capabilities, source: str) -> Refusal:
    prefix = word.partition(":")[0]
    declared = ", ".join(f"{prefix}:{name}" for name in capabilities.names(prefix))
    reason = f"needed, and not declared; declared with {prefix}: are {declared or 'none'}"
    return Refusal(source, word, reason)
