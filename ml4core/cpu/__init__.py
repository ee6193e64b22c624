"""The embedded default backend: torch on the CPU, a plugin like any other."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import Backend, hookimpl


@hookimpl
def ml4core_backends() -> Sequence[Backend]:
    from ml4core.cpu.backend import CpuBackend

    return [CpuBackend()]
