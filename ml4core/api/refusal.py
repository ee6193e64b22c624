"""Every "no" carries a reason, and all reasons are raised at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
