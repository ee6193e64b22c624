"""Which device is which rank's, and why there are too few."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import Device, Refusal

FLAG = "--tensor-parallel-size"


def is_shared(device: Device) -> bool:
    """Whether any number of ranks can run there: on the host's cores."""
    return device.torch_device == "cpu"


def device_of(devices: Sequence[Device], rank: int) -> Device:
    """The device of a rank, of which ``refusals`` found enough."""
    return devices[0] if is_shared(devices[0]) else devices[rank]


def refusals(size: int, devices: Sequence[Device]) -> list[Refusal]:
    """What keeps so many ranks from having a device each; their devices are alike."""
    if size == 1 or is_shared(devices[0]):
        return []
    count, first = len(devices), devices[0]
    if count < size:
        names = ", ".join(device.torch_device for device in devices)
        reason = f"{size} ranks need {size} devices, and there are {count}: {names}"
        return [Refusal("core", f"{FLAG} {size}", reason, f"{FLAG} {count} or less")]
    for rank, device in enumerate(devices[:size]):
        if (device.name, device.arch) != (first.name, first.arch):
            reason = (
                f"rank {rank} would have {device.name} ({device.arch}), and rank 0 has "
                f"{first.name} ({first.arch})"
            )
            works = f"{FLAG} {rank} or less; or devices of one kind alone"
            return [Refusal("core", f"{FLAG} {size}", reason, works)]
    return []
