"""Google TPUs for ml4core: the hooks. No vendor library is imported until a probe runs."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import Backend, Capabilities, Deployment, Refusal, hookimpl
from ml4core_tpu.backend import TpuBackend
from ml4core_tpu.capabilities import refusals


@hookimpl
def ml4core_backends() -> Sequence[Backend]:
    return (TpuBackend(),)


@hookimpl
def ml4core_refusals(deployment: Deployment, capabilities: Capabilities) -> Sequence[Refusal]:
    return refusals(deployment, capabilities)
