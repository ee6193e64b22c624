"""The worker's side of a run: a process that loads the backend once and judges unit after unit."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from ml4core_conformance.check import Check, Status
from ml4core_conformance.judge import DEVICE_LOST, described, judge_unit, lost_with, spoilt
from ml4core_conformance.results import CheckResult
from ml4core_conformance.subject import Subject
from ml4core_conformance.target import Target, Unloadable

CLOSING_S = 60.0
"""Seconds that closing a unit's sessions may take."""

READY, RESULT, DONE = "ready", "result", "done"
"""Words that a worker sends: once it can judge, with each result, and after each unit."""

BROKEN, UNUSABLE = "broken", "unusable"
"""Its last words: with a result, in place of ``RESULT``, after which the device no longer works for
this process; with the reason, in place of ``READY``, if the device never did.
"""


def work(target: Target, connection: Connection, log: str, threads: int, doubted: bool) -> None:
    """Judges the units that come as lists of check ids, until None comes or the device is lost.

    Args:
        log: file that takes what this process prints; emptied before each unit.
        threads: of torch, at most.
        doubted: whether to try the device first, as other processes have lost it.
    """
    os.setsid()  # a group of its own, so that all of it can be ended, and Ctrl-C is the parent's
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)
    torch.set_num_threads(max(1, min(torch.get_num_threads(), threads)))
    if doubted and (why := target.state.unusable(target.device)):
        connection.send((UNUSABLE, why))
        return
    backend, suite = target.load(), target.suite()
    connection.send((READY, None))
    while (ids := connection.recv()) is not None:
        os.ftruncate(output, 0)
        unit = target.checks(ids, suite)
        limits = [*(target.limit(check) for check in unit[1:]), CLOSING_S, CLOSING_S]
        faulthandler.dump_traceback_later(target.limit(unit[0]), file=2)
        results: Iterator[CheckResult] = (
            _unloaded(backend, target.subject(backend), unit)
            if isinstance(backend, Unloadable)
            else judge_unit(target.subject(backend), unit)
        )
        result = None
        for result, limit in zip(results, limits, strict=False):
            # After each check, and not where one is red alone, so that a fault is of the right one.
            if why := target.state.lost(target.device):
                connection.send((BROKEN, lost_with(result, why)))
                return
            connection.send((RESULT, result))
            faulthandler.dump_traceback_later(limit, file=2)
        if result is not None and (why := target.state.lost(target.device)):
            reason = f"closing the session lost the device: {why}"
            connection.send((BROKEN, spoilt(result, reason, DEVICE_LOST)))
            return
        faulthandler.cancel_dump_traceback_later()
        connection.send((DONE, None))


def _unloaded(
    backend: Unloadable, subject: Subject, unit: Sequence[Check]
) -> Iterator[CheckResult]:
    """Only what judges the plugin itself makes sense."""
    refused: Any = backend.refused
    for check in unit:
        if check.profile == "plugin":
            yield from judge_unit(subject, [check])
        else:
            reason = f"the plugin can't be loaded: {described(refused)}"
            yield CheckResult.of(check, Status.ERROR, reason, raised=type(refused).__name__)
