"""What the cuda backend can do on a device, and what no version of it will."""

from __future__ import annotations

from ml4core.api import Capabilities, Deployment, Device, Refusal

SERVED = frozenset({"sm_90", "sm_100"})
"""Architectures that the backend is made for."""


def capabilities(device: Device) -> Capabilities:
    """Nothing yet: no kernel serves any word of the vocabulary."""
    return Capabilities(frozenset())


def refusals(deployment: Deployment, capabilities: Capabilities) -> tuple[Refusal, ...]:
    """Reasons that lie in the hardware, whatever kernels exist."""
    arch, kv, index = deployment.device.arch, deployment.kv_layout, deployment.index_layout
    found = []
    if kv == "e4m3fnuz":
        reason = "NVIDIA GPUs convert e4m3fn only; the fnuz flavour has another bias and no -0"
        found.append(Refusal("cuda", "kv:e4m3fnuz", reason, "--kv-cache-dtype fp8_ds_mla"))
    if kv == "nvfp4_ds_mla" and arch != "sm_100":
        reason = f"FP4 rows are decoded by sm_100; this device is {arch}"
        found.append(Refusal("cuda", "kv:nvfp4_ds_mla", reason, "--kv-cache-dtype fp8_ds_mla"))
    if index == "planar_ue8m0x4" and arch != "sm_100":
        reason = f"packed UE8M0 scales are read by sm_100; this device is {arch}"
        found.append(Refusal("cuda", "index:planar_ue8m0x4", reason, "index:planar_f32"))
    return tuple(found)
