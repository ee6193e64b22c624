"""The cpu backend as a plugin by another name, of which a rank goes wrong as the environment says.

``ML4_TEST_RANKS``: what goes wrong, on which rank. ``ML4_TEST_MEMORY``: MiB of each rank's device,
which then tells of its memory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ml4core.api import Capabilities, Deployment, Device, Fault, Refusal, Refused, hookimpl
from ml4core.cpu.backend import CpuBackend
from support.metered import MIB, Meter, Metered

NAME = "ranked"
WRONG, MEMORY = "ML4_TEST_RANKS", "ML4_TEST_MEMORY"
STEPS = 3
"""Steps that go well before one that doesn't."""


def wrong() -> str:
    """What goes wrong on this rank."""
    what, _, rank = os.environ.get(WRONG, "").partition(":")
    here = dist.get_rank() if dist.is_initialized() else 0
    return what if rank in (str(here), "all") else ""


class Ranked:
    """A session around that of the cpu."""

    def __init__(self, inner: Any, deployment: Deployment) -> None:
        self._inner = inner
        self._device = deployment.device
        self._embedded = 0
        self.ops: Mapping[str, Callable[..., object]] = dict(inner.ops) | {"embed": self._embed}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare_weights(self, weights: Any, layer: Any, part: str = "decoder") -> Any:
        if layer is not None and wrong() == "load":
            raise MemoryError("the chip is full")
        if layer is not None and wrong() == "killed at load":
            os.kill(os.getpid(), signal.SIGKILL)
        return self._inner.prepare_weights(weights, layer, part)

    def _embed(self, *args: Any, **kwargs: Any) -> Any:
        self._embedded += 1
        if self._embedded > STEPS:
            if wrong() == "step":
                raise ZeroDivisionError("in an op")
            if wrong() == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if wrong() == "full":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if wrong() == "stalled":
                time.sleep(3600)
            if wrong() == "broken off":
                self._embedded = 0
                raise KeyboardInterrupt
        return self._inner.ops["embed"](*args, **kwargs)

    def fault(self) -> Fault | None:
        if self._embedded > STEPS and wrong() == "fault":
            return Fault("device", "the chip is hot", 0)
        found: Fault | None = self._inner.fault()
        return found


class RankedBackend(CpuBackend):
    name = NAME
    priority = 1

    def capabilities(self, device: Device) -> Capabilities:
        found = super().capabilities(device)
        return replace(found, features=found.features | {"feature:graph_capture"})

    def open(self, deployment: Deployment) -> Any:
        if wrong() == "open":
            raise Refused([Refusal(NAME, "chip", "it has no fan", "a fan")], "--backend ranked")
        session = Ranked(super().open(deployment), deployment)
        sizes = os.environ.get(MEMORY)
        if sizes is None:
            return session
        total = int(sizes.split(",")[dist.get_rank()]) * MIB
        return Metered(session, deployment, Meter(total=total), set())


@hookimpl
def ml4core_backends() -> Sequence[Any]:
    return [RankedBackend()]
