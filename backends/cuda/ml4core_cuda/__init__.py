"""NVIDIA GPUs for ml4core: the hooks. No vendor library is imported until a probe runs."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import Backend, Capabilities, Deployment, Refusal, hookimpl
from ml4core_cuda.backend import CudaBackend
from ml4core_cuda.capabilities import refusals


@hookimpl
def ml4core_backends() -> Sequence[Backend]:
    return (CudaBackend(),)


@hookimpl
def ml4core_refusals(deployment: Deployment, capabilities: Capabilities) -> Sequence[Refusal]:
    return refusals(deployment, capabilities)
