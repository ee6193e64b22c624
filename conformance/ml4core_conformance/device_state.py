"""Whether a device still works for a process.

On some devices a kernel that reaches memory which is not its own breaks the state that the driver
keeps for the process: every call after it fails, whatever it asks for, until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch

from ml4core.api import Device
from ml4core.registry import describe

ANSWER_S = 30.0
"""Seconds in which a device must answer. One that a kernel holds for ever doesn't."""

_ONES = 64


class DeviceState:
    """Asks torch, in words that all its accelerators share.

    A device that is not torch's accelerator, as the host's processor, is asked nothing: there such
    a fault ends the process, or is an exception like others.
    """

    def lost(self, device: Device) -> str:
        """Why the device no longer works for this process; empty if it does. Waits for what is
        queued there, so that its faults are told too; one that was not used yet stays so.
        """

        def answers() -> str:
            if not torch.accelerator.is_available():
                return f"torch no longer finds {device.torch_device!r}"
            torch.accelerator.synchronize(torch.device(device.torch_device))
            return ""

        return _asked(answers) if _accelerator(device) else ""

    def unusable(self, device: Device) -> str:
        """Why a process that has just started can't compute on the device; empty if it can."""

        def computes() -> str:
            total = float(torch.ones(_ONES, device=device.torch_device).sum())
            return "" if total == _ONES else f"the sum of {_ONES} ones is {total:g} there"

        return _asked(computes) if _accelerator(device) else ""


def _accelerator(device: Device) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and str(device.torch_device).partition(":")[0] == current.type


def _asked(question: Callable[[], str]) -> str:
    """The answer; what was raised in its place; or that none came, as waits can't be ended."""
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            answers.append(describe(error))

    thread = Thread(target=ask, name="ml4-device-state", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return answers[0] if answers else f"it does not answer within {ANSWER_S:g} s"
