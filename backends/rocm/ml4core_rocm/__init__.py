"""AMD GPUs for ml4core: the hooks. No vendor library is imported until a probe runs."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import Backend, Capabilities, Deployment, Refusal, hookimpl
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.refusals import refusals


@hookimpl
def ml4core_backends() -> Sequence[Backend]:
    return (RocmBackend(),)


@hookimpl
def ml4core_refusals(deployment: Deployment, capabilities: Capabilities) -> Sequence[Refusal]:
    return refusals(deployment, capabilities)
