"""The tpu backend: what it finds on this machine, and what it needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from ml4core.api import Capabilities, Deployment, Device, Probe, Refusal, Refused
from ml4core_tpu.capabilities import SERVED, capabilities
from ml4core_tpu.driver import Chip, find_chips
from ml4core_tpu.libraries import find_libtpu, find_optional, find_runtime


class TpuBackend:
    """TPUs through JAX, torch-xla or torch-tpu, whichever runtime is here."""

    name = "tpu"
    priority = 100

    def probe(self) -> Probe:
        """Every fact is gathered, so one run shows all that is missing."""
        chips, driver_faults = find_chips()
        runtime, runtime_faults = find_runtime()
        libtpu, libtpu_faults = find_libtpu(chips)
        libraries = ", ".join(found for found in (runtime, libtpu, *find_optional()) if found)
        return Probe(
            refusals=(
                *driver_faults,
                *(_too_far(chip) for chip in chips if chip.arch not in SERVED),
                *runtime_faults,
                *libtpu_faults,
                _no_kernels(chips, libraries),
            )
        )

    def capabilities(self, device: Device) -> Capabilities:
        return capabilities(device)

    def open(self, deployment: Deployment) -> NoReturn:
        raise Refused(self.probe().refusals, what=f"--backend {self.name}")


def _too_far(chip: Chip) -> Refusal:
    served = ", ".join(sorted(SERVED))
    reason = f"{chip} is of a generation that the backend is not made for"
    return Refusal("tpu", f"chip {chip.index}", reason, f"a chip of {served}")


def _no_kernels(chips: tuple[Chip, ...], libraries: str) -> Refusal:
    try:
        release = f"version {version('ml4core-tpu')} of ml4core-tpu"
    except PackageNotFoundError:
        release = "this checkout of ml4core-tpu"
    found = "; ".join(str(chip) for chip in chips) or "no chip"
    reason = f"{release} has no kernels yet; found: {found}; libraries: {libraries or 'none'}"
    return Refusal("tpu", "kernels", reason, "--backend cpu")
