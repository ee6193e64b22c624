"""The rocm backend: what it finds on this machine, and how it opens."""

from __future__ import annotations

from collections.abc import Sequence
from os import environ

from ml4core.api import (
    Capabilities,
    Deployment,
    Device,
    Probe,
    Refusal,
    Refused,
    Session,
    undeclared,
)
from ml4core_rocm import aiter_functions, devices
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.driver import Gpu, find_gpus
from ml4core_rocm.libraries import (
    find_optional,
    find_other_gpu,
    find_torch,
    find_triton,
    hip_version,
)
from ml4core_rocm.providers import FUNCTIONS
from ml4core_rocm.refusals import refusals
from ml4core_rocm.switches import read
from ml4core_triton.interpreter import compiler_refusals, interpreter_refusals


class RocmBackend:
    """AMD GPUs through torch and triton. Without one, kernels also run in Triton's interpreter on
    the host, as a device of kind ``interpreted``; their sources compile for an NVIDIA GPU, as one
    of kind ``source``; and torch alone, as one of kind ``fake``, stands for the GPU in everything
    but its kernels.
    """

    name = "rocm"
    priority = 100
    reference_device = devices.REFERENCE

    def probe(self) -> Probe:
        """Every fact is gathered, so one run shows all that is missing."""
        gpus, driver_faults = find_gpus()
        torch, torch_faults = find_torch()
        triton, triton_faults = find_triton()
        details = {"torch": torch, "triton": triton, "libraries": ", ".join(find_optional())}
        details |= {"ml4core-rocm": devices.release()}
        if hip := hip_version():
            details["hip"] = hip
        refusals = (
            *driver_faults,
            *(_too_far(gpu) for gpu in gpus if gpu.arch not in devices.SERVED),
            *torch_faults,
            *triton_faults,
        )
        found: list[Device] = []
        if not torch_faults and not triton_faults:
            found += (devices.real(gpu, details) for gpu in gpus if gpu.arch in devices.SERVED)
        if torch and triton:
            found.append(devices.interpreted(details))
        if torch:
            found.append(devices.fake(details))
        if torch and triton and (other := find_other_gpu()):
            found.append(devices.source(other, "cuda:0", details))
        return Probe(tuple(found), refusals)

    def capabilities(self, device: Device) -> Capabilities:
        return capabilities(device)

    def open(self, deployment: Deployment) -> Session:
        declared = capabilities(deployment.device)
        reasons = [*_device_refusals(deployment.device), *refusals(deployment, declared)]
        reasons += undeclared(deployment.needs, declared, self.name)
        reasons += _library_refusals(deployment, declared)
        if reasons:
            raise Refused(reasons, what=f"--backend {self.name}")
        from ml4core_rocm.session import RocmSession

        return RocmSession(deployment)


def _device_refusals(device: Device) -> Sequence[Refusal]:
    """Why the device can't be used from this process."""
    if device.kind == "fake":
        return ()
    if device.kind == "interpreted":
        # The switch comes first: finding triton imports it.
        return (*interpreter_refusals("rocm"), *find_triton()[1])
    if device.kind == "source":
        return _source_refusals()
    if device.arch not in devices.SERVED:
        reason = f"{device.name} is a {device.kind} device of architecture {device.arch!r}"
        remedy = f"a GPU of {', '.join(sorted(devices.SERVED))}; or a device of kind interpreted"
        return (Refusal("rocm", "device", reason, remedy),)
    return (*find_torch()[1], *find_triton()[1]) or compiler_refusals("rocm")


def _source_refusals() -> Sequence[Refusal]:
    """Why sources can't be compiled for the GPU that is here."""
    reasons = [*find_triton()[1]]
    if not find_other_gpu():
        reason = "torch reaches no GPU beside AMD's, for which sources could be compiled"
        reasons.append(Refusal("rocm", "device", reason, "torch for CUDA, and a GPU of it"))
    return reasons or compiler_refusals("rocm")


def _library_refusals(deployment: Deployment, declared: Capabilities) -> Sequence[Refusal]:
    """Whether AITER is there, in a release whose functions are called as they want, if a GPU is to
    use it.
    """
    switches, _ = read(deployment, declared, environ)
    if not switches.use_aiter or deployment.device.kind != "real":
        return ()
    return aiter_functions.refusals(FUNCTIONS)


def _too_far(gpu: Gpu) -> Refusal:
    served = ", ".join(sorted(devices.SERVED))
    reason = f"{gpu} is of an architecture that the backend is not made for"
    return Refusal("rocm", f"GPU {gpu.index}", reason, f"a GPU of {served}")
