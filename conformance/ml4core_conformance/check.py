"""What a check is, how it can end, and what it measures on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ml4core.api import Device
    from ml4core_conformance.subject import Subject

Profile = Literal["plugin", "ops", "layouts", "model", "system", "perf"]
PROFILES: tuple[Profile, ...] = ("plugin", "ops", "layouts", "model", "system", "perf")


def slowness(device: Device) -> float:
    """By how much all that is timed may take longer on a device: its kernels may be interpreted."""
    return 10.0 if device.kind == "interpreted" else 1.0


def is_slow(device: Device) -> bool:
    """Whether each row takes milliseconds, so that laws are judged by fewer draws. What is measured
    of a law tells their count.
    """
    return device.kind == "interpreted"


class Status(StrEnum):
    """How a check ended. Only PASS is green by itself.

    UNSUPPORTED is proven: the backend does not declare what the check needs, and it refused to
    serve it. NOT_RUN says nothing about the backend and is never green.
    """

    PASS = "PASS"
    FAIL = "FAIL"
    ERROR = "ERROR"
    UNSUPPORTED = "UNSUPPORTED"
    WAIVED = "WAIVED"
    NOT_RUN = "NOT-RUN"


class CheckFailed(AssertionError):
    """The backend broke its contract. The message names the slice, the error and the bound."""


class NotRun(Exception):
    """The check can't be made here; the message says why, and what it would take."""


@dataclass(frozen=True)
class Measure:
    """One judged number.

    Attributes:
        what: what was judged, e.g. ``out elements``.
        error: the worst error found.
        bound: what is allowed there; an error at or below it passes.
        where: the slice where it was found, e.g. ``case h8/bf16 seed 0, row 3, head 5``.
    """

    what: str
    error: float
    bound: float
    where: str

    @property
    def ratio(self) -> float:
        """error / bound; infinite where nothing is allowed and something was found."""
        if self.bound > 0:
            return self.error / self.bound
        return 0.0 if self.error == 0 else float("inf")


@dataclass(frozen=True)
class Check:
    """One verdict of the suite, as data. Its id is ``family`` or ``family[variant]``.

    Attributes:
        family: dotted name of what is proven, e.g. ``ops.elements``.
        run: judges a subject: returns when it passes and raises ``CheckFailed`` when it doesn't.
            ``NotRun`` is passed on; any other exception is an ERROR. What it judged it tells by
            ``subject.measure``.
        doc: one or two sentences for ``explain``: what is proven, and what a failure means.
        variant: what of the family is judged, e.g. ``sparse_mla/fp8_ds_mla``.
        requires: capability words. If one is undeclared the check is not run; the runner then
            demands a refusal and calls it UNSUPPORTED.
        since: API version whose backends it judges.
        provisional: reported, but never gates; for checks younger than one release.
        unit: checks of one unit run one after the other in one process, and share cached work.
        isolated: runs in a process of its own, as it may crash or hang.
        timeout_s: seconds after which it is a FAIL, on any machine; longer on a device that only
            interprets its kernels, see ``Target.limit``.
        bugs: ids of known public faults that it guards against.
    """

    family: str
    profile: Profile
    run: Callable[[Subject], None]
    doc: str
    variant: str = ""
    requires: frozenset[str] = frozenset()
    since: int = 1
    provisional: bool = False
    unit: str = ""
    isolated: bool = False
    timeout_s: float = 120.0
    bugs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.family}[{self.variant}]" if self.variant else self.family
