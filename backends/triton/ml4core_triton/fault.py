"""The sticky fault word of a device, and its copy on the host.

The executor sets a fault where the driver tells of one. The word is for kernels that wait for one
another: no kernel of this version does, and none writes to it. What kernels do find wrong, NaN, is
among their results, which core judges, and a slot outside of a cache is skipped. The first fault
stays. The copy is queued behind each step, so that the host reads it without waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ml4core.api import Fault

CODES: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        1: ("timeout", "a kernel waited for another one past its deadline"),
        2: ("device", "a kernel met an address outside of its cache"),
    }
)
"""Values of the word: the fault's code and its message. 0 is none."""


class FaultWord:
    """The word of one session.

    Attributes:
        word: int32 [1] on the device, 0 or a key of ``CODES``. A kernel that writes to it does so
            by a compare-and-swap against 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.word: Tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self._host = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._steps = 0
        self._fault: Fault | None = None

    def publish(self) -> None:
        """Queues the copy to the host; called once behind each step."""
        self._steps += 1
        self._host.copy_(self.word, non_blocking=True)

    def fail(self, message: str) -> None:
        """Notes an error that the driver told: the device can't go on."""
        if self._fault is None:
            self._fault = Fault("device", message, self._steps)

    def read(self) -> Fault | None:
        """The fault as far as the host knows; doesn't wait."""
        if self._fault is None and (value := int(self._host[0])):
            code, message = CODES.get(value, ("device", f"unknown word {value}"))
            self._fault = Fault(code, message, self._steps)
        return self._fault
