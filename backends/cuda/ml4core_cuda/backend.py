"""The cuda backend: what it finds on this machine, and how it opens."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import (
    Capabilities,
    Deployment,
    Device,
    Probe,
    Refusal,
    Refused,
    Session,
    undeclared,
    unknown_switches,
)
from ml4core_cuda import latency
from ml4core_cuda.capabilities import SERVED, capabilities
from ml4core_cuda.driver import Gpu, find_gpus
from ml4core_cuda.ffn_stage import release
from ml4core_cuda.libraries import find_optional, find_torch, find_triton
from ml4core_triton.interpreter import compiler_refusals, interpreter_refusals


class CudaBackend:
    """NVIDIA GPUs through torch and triton. Where these two are, kernels also run in Triton's
    interpreter on the host, as a device of kind ``interpreted``.
    """

    name = "cuda"
    priority = 100
    reference_device = Device(
        "real", "NVIDIA H200", "sm_90", "cuda:0", memory_bytes=int(139.8 * 2**30)
    )

    def probe(self) -> Probe:
        """Every fact is gathered, so one run shows all that is missing."""
        gpus, driver_faults = find_gpus()
        torch, torch_faults = find_torch()
        triton, triton_faults = find_triton()
        details = {"torch": torch, "triton": triton, "libraries": ", ".join(find_optional())}
        details |= {"ml4core-cuda": release()}
        refusals = (
            *driver_faults,
            *(_too_far(gpu) for gpu in gpus if gpu.arch not in SERVED),
            *torch_faults,
            *triton_faults,
        )
        devices: list[Device] = []
        if not torch_faults and not triton_faults:
            devices += (_device(gpu, details) for gpu in gpus if gpu.arch in SERVED)
        if torch and triton:
            name = "Triton's interpreter on the host"
            devices.append(Device("interpreted", name, "sm_90", "cpu", details=details))
        return Probe(tuple(devices), refusals)

    def capabilities(self, device: Device) -> Capabilities:
        return capabilities(device)

    def open(self, deployment: Deployment) -> Session:
        reasons = [*_device_refusals(deployment)]
        reasons += undeclared(deployment.needs, capabilities(deployment.device), self.name)
        reasons += latency.refusals(deployment)
        reasons += unknown_switches(deployment, self.name)
        if reasons:
            raise Refused(reasons, what=f"--backend {self.name}")
        from ml4core_cuda.session import CudaSession

        return CudaSession(deployment)


def _device_refusals(deployment: Deployment) -> Sequence[Refusal]:
    """Why the device can't be used from this process."""
    device = deployment.device
    if device.kind == "interpreted":
        # The switch comes first: finding triton imports it.
        return (*interpreter_refusals("cuda"), *find_triton()[1])
    if device.kind != "real" or device.arch not in SERVED:
        reason = f"{device.name} is a {device.kind} device of architecture {device.arch!r}"
        remedy = f"a GPU of {', '.join(sorted(SERVED))}; or a device of kind interpreted"
        return (Refusal("cuda", "device", reason, remedy),)
    return (*find_torch()[1], *find_triton()[1]) or compiler_refusals("cuda")


def _device(gpu: Gpu, details: dict[str, str]) -> Device:
    return Device(
        "real", gpu.name, gpu.arch, f"cuda:{gpu.index}", gpu.index, gpu.memory_bytes, details
    )


def _too_far(gpu: Gpu) -> Refusal:
    served = ", ".join(sorted(SERVED))
    reason = f"{gpu} is of an architecture that the backend is not made for"
    return Refusal("cuda", f"GPU {gpu.index}", reason, f"a GPU of {served}")
