"""Runs one check on a subject, and says how it ended."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ml4core.registry import describe
from ml4core_conformance.check import Check, CheckFailed, NotRun, Status
from ml4core_conformance.refusing import prove_refusal
from ml4core_conformance.results import CheckResult
from ml4core_conformance.subject import Subject

_OURS = str(Path(__file__).parent)
_FRAMES = 4

DEVICE_LOST = "DeviceLost"
"""What a check raised, in its result, if nothing did and the device no longer works."""


def judge(subject: Subject, check: Check) -> CheckResult:
    """The result of a check. Whatever Python can catch is in it; interruptions are passed on."""
    subject.measures.clear()
    subject.exercised.clear()
    start = time.monotonic()
    status, reason, raised = _run(subject, check)
    seconds = time.monotonic() - start
    measures, exercised = subject.measures, subject.exercised
    return CheckResult.of(check, status, reason, measures, seconds, raised, exercised)


def judge_unit(subject: Subject, checks: Sequence[Check]) -> Iterator[CheckResult]:
    """Results of the checks of one unit, in order; then the subject is closed. If that fails, the
    last result comes once more, as that failure.
    """
    result: CheckResult | None = None
    for check in checks:
        result = judge(subject, check)
        yield result
    try:
        subject.close()
    except (Exception, SystemExit) as error:
        if result is not None:
            yield spoilt(result, f"the session's close() raised {described(error)}", error)


def spoilt(result: CheckResult, reason: str, error: BaseException | str) -> CheckResult:
    """A result of a unit that failed at its end. What was red already keeps its reason."""
    if result.status not in (Status.PASS, Status.UNSUPPORTED):
        return result
    raised = error if isinstance(error, str) else type(error).__name__
    reason = f"after the checks of this unit: {reason}"
    return replace(result, status=Status.FAIL, reason=reason, raised=raised)


def lost_with(result: CheckResult, why: str) -> CheckResult:
    """The result of a check after which the device no longer works. What was red keeps its status
    and what it raised; what was not is an ERROR.
    """
    lost = (
        f"the device was lost with this check: {why}. The checks before it in this process left "
        "it working; faults are told late, so that any call of this check may be the one at fault"
    )
    if result.status in (Status.FAIL, Status.ERROR):
        return replace(result, reason=f"{result.reason}\n{lost}")
    ended = f"{result.status} {result.reason}".rstrip()
    reason = f"{lost}. The check itself ended as {ended}"
    return replace(result, status=Status.ERROR, reason=reason, raised=DEVICE_LOST)


def described(error: BaseException) -> str:
    """The error, and the innermost lines that led to it, those of the suite left out."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if not frame.filename.startswith(_OURS)] or list(frames)
    where = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in shown[-_FRAMES:]]
    return "\n".join([describe(error), *where])


def _run(subject: Subject, check: Check) -> tuple[Status, str, str]:
    """Status, reason, and the type of what was raised."""
    try:
        missing = subject.capabilities.missing(check.requires) if check.requires else ()
        if missing:
            return Status.UNSUPPORTED, prove_refusal(subject, missing), ""
        check.run(subject)
    except CheckFailed as failure:
        return Status.FAIL, str(failure), type(failure).__name__
    except NotRun as reason:
        return Status.NOT_RUN, str(reason), type(reason).__name__
    except (Exception, SystemExit) as error:
        return Status.ERROR, described(error), type(error).__name__
    return Status.PASS, "", ""
