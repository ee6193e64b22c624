"""The tpu backend: what it finds on this machine, and how it opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

from ml4core.api import (
    Capabilities,
    Deployment,
    Device,
    KVLayout,
    ModelSpec,
    Probe,
    Refusal,
    Refused,
    Session,
    undeclared,
    unknown_switches,
)
from ml4core_tpu.buckets import buckets_of
from ml4core_tpu.capabilities import SERVED, capabilities
from ml4core_tpu.compilation import compilation_refusals, stays_on_devices
from ml4core_tpu.driver import Chip, find_chips
from ml4core_tpu.layouts import layouts_for
from ml4core_tpu.libraries import INSTALL, find_libtpu, find_optional, find_runtime
from ml4core_tpu.release import release
from ml4core_tpu.runtimes import SWITCHES, runtime_of, runtime_reasons, runtime_refusals

HBM_BYTES = int(94.75 * 2**30)
"""What the compiler has of one of the devices that a tpu7x chip is."""
PER_CHIP = 2
"""Devices that a tpu7x chip is: one for each of its cores."""
_INTERPRETED = '--additional-config \'{"device": "interpreted"}\''


class TpuBackend:
    """TPUs through JAX, torch-xla or torch-tpu, whichever runtime is asked for. Where JAX is, the
    kernels also run interpreted on the host, as a device of kind ``interpreted``.
    """

    name = "tpu"
    priority = 100
    reference_device = Device("real", "TPU v7x", "tpu7x", "xla", memory_bytes=HBM_BYTES)

    def probe(self) -> Probe:
        """Every fact is gathered, so one run shows all that is missing."""
        chips, driver_faults = find_chips()
        jax, runtime_faults = find_runtime()
        libtpu, libtpu_faults = find_libtpu(chips)
        if not chips:
            # What is missing is the hardware. Libraries that would serve it are no other reason.
            libtpu_faults = ()
            if find_spec("jax") is None:
                runtime_faults = ()
                driver_faults = tuple(map(_or_interpreted, driver_faults))
        found = (jax, libtpu, *find_optional())
        details = {"libraries": ", ".join(one for one in found if one), "ml4core-tpu": release()}
        details |= {f"runtime {name}": text for name, text in runtime_reasons().items()}
        devices: list[Device] = []
        if jax and not (driver_faults or libtpu_faults):
            served = sum(chip.arch in SERVED for chip in chips)
            devices += [_tpu(index, details) for index in range(PER_CHIP * served)]
        if jax:
            name = "Pallas kernels interpreted by XLA on the host"
            devices.append(Device("interpreted", name, "tpu7x", "cpu", details=details))
        return Probe(
            tuple(devices),
            (
                *driver_faults,
                *(_too_far(chip) for chip in chips if chip.arch not in SERVED),
                *runtime_faults,
                *libtpu_faults,
            ),
        )

    def capabilities(self, device: Device) -> Capabilities:
        return capabilities(device)

    def programs_for(self, deployment: Deployment) -> Mapping[str, Sequence[int]]:
        """Of each device alike, as every tensor rank runs all rows of its replica: rows of a
        layer's program, rows of logits, and the tables' requests and pages.
        """
        found = buckets_of(deployment)
        tables = (found.most_requests, found.pages)
        return {"tokens": found.tokens, "requests": found.requests, "page_table": tables}

    def layouts_for(self, model: ModelSpec) -> Mapping[str, KVLayout]:
        """The private layouts of a session of this model, for plans."""
        return layouts_for(model)

    def open(self, deployment: Deployment) -> Session:
        reasons = [
            *_device_refusals(deployment),
            *runtime_refusals(deployment),
            *compilation_refusals(deployment),
            *undeclared(deployment.needs, capabilities(deployment.device), self.name),
            *unknown_switches(deployment, self.name, SWITCHES),
        ]
        if reasons:
            raise Refused(reasons, what=f"--backend {self.name}")
        if stays_on_devices(deployment):
            from ml4core_tpu.resident_session import ResidentSession

            return ResidentSession(deployment, runtime_of(deployment))
        from ml4core_tpu.session import TpuSession

        return TpuSession(deployment, runtime_of(deployment))


def _device_refusals(deployment: Deployment) -> tuple[Refusal, ...]:
    """Why the devices can't be used from this process."""
    device = deployment.device
    if device.kind == "interpreted" and device.arch in SERVED:
        return find_runtime()[1]
    if device.kind == "real" and device.arch in SERVED:
        chips, faults = find_chips()
        if not chips:
            return faults
        others = tuple(_too_far(chip) for chip in chips if chip.arch not in SERVED)
        few = _too_few(deployment, PER_CHIP * len(chips))
        return (*faults, *others, *few, *find_libtpu(chips)[1])
    reason = f"{device.name} is a {device.kind} device of architecture {device.arch!r}"
    remedy = f"a chip of {', '.join(sorted(SERVED))}; or a device of kind interpreted"
    return (Refusal("tpu", "device", reason, remedy),)


def _too_few(deployment: Deployment, count: int) -> tuple[Refusal, ...]:
    tensor = deployment.tensor_parallel_size
    if tensor <= count:
        return ()
    reason = f"this host's chips are {count} devices"
    remedy = f"--tensor-parallel-size {count} or less, with hosts as --data-parallel-size"
    return (Refusal("tpu", f"--tensor-parallel-size {tensor}", reason, remedy),)


def _too_far(chip: Chip) -> Refusal:
    served = ", ".join(sorted(SERVED))
    reason = f"{chip} is of a generation that the backend is not made for"
    return Refusal("tpu", f"chip {chip.index}", reason, f"a chip of {served}")


def _or_interpreted(fault: Refusal) -> Refusal:
    """That there is no chip, where there is no JAX either."""
    remedy = f"{fault.remedy}; or {_INTERPRETED}, which runs on the host, after {INSTALL}"
    return replace(fault, remedy=remedy)


def _tpu(index: int, details: Mapping[str, str]) -> Device:
    """torch sees its tensors as the host's: JAX has their values on the device."""
    return Device(
        "real", "TPU v7x", "tpu7x", "cpu", index=index, memory_bytes=HBM_BYTES, details=details
    )
