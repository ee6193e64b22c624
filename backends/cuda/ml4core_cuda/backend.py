"""The cuda backend: what it finds on this machine, and what it needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from ml4core.api import Capabilities, Deployment, Device, Probe, Refusal, Refused
from ml4core_cuda.capabilities import SERVED, capabilities
from ml4core_cuda.driver import Gpu, find_gpus
from ml4core_cuda.libraries import find_optional, find_torch, find_triton


class CudaBackend:
    """NVIDIA GPUs through torch and triton."""

    name = "cuda"
    priority = 100

    def probe(self) -> Probe:
        """Every fact is gathered, so one run shows all that is missing."""
        gpus, driver_faults = find_gpus()
        torch, torch_faults = find_torch()
        triton, triton_faults = find_triton()
        libraries = ", ".join(found for found in (torch, triton, *find_optional()) if found)
        return Probe(
            refusals=(
                *driver_faults,
                *(_too_far(gpu) for gpu in gpus if gpu.arch not in SERVED),
                *torch_faults,
                *triton_faults,
                _no_kernels(gpus, libraries),
            )
        )

    def capabilities(self, device: Device) -> Capabilities:
        return capabilities(device)

    def open(self, deployment: Deployment) -> NoReturn:
        raise Refused(self.probe().refusals, what=f"--backend {self.name}")


def _too_far(gpu: Gpu) -> Refusal:
    served = ", ".join(sorted(SERVED))
    reason = f"{gpu} is of an architecture that the backend is not made for"
    return Refusal("cuda", f"GPU {gpu.index}", reason, f"a GPU of {served}")


def _no_kernels(gpus: tuple[Gpu, ...], libraries: str) -> Refusal:
    try:
        release = f"version {version('ml4core-cuda')} of ml4core-cuda"
    except PackageNotFoundError:
        release = "this checkout of ml4core-cuda"
    found = "; ".join(str(gpu) for gpu in gpus) or "no GPU"
    reason = f"{release} has no kernels yet; found: {found}; libraries: {libraries or 'none'}"
    return Refusal("cuda", "kernels", reason, "--backend cpu")
