"""What the rocm backend can do on a device, and what no version of it will."""

from __future__ import annotations

from ml4core.api import Capabilities, Deployment, Device, Refusal

SERVED = frozenset({"gfx942", "gfx950"})
"""Architectures that the backend is made for."""

_FP8_FLAVOUR = {"gfx942": "e4m3fnuz", "gfx950": "e4m3"}
"""Architecture -> the latent layout whose FP8 flavour its matrix units compute with. It goes by the
architecture, not by the vendor."""


def capabilities(device: Device) -> Capabilities:
    """Nothing yet: no kernel serves any word of the vocabulary."""
    return Capabilities(frozenset())


def refusals(deployment: Deployment, capabilities: Capabilities) -> tuple[Refusal, ...]:
    """Reasons that lie in the hardware and in the row that its kernels read."""
    arch, kv = deployment.device.arch, deployment.kv_layout
    native = _FP8_FLAVOUR.get(arch)
    if kv in _FP8_FLAVOUR.values() and native is not None and kv != native:
        reason = f"{arch} computes with the FP8 flavour of {native}"
        return (Refusal("rocm", f"kv:{kv}", reason, "--kv-cache-dtype fp8, or bfloat16"),)
    if kv == "fp8_ds_mla":
        reason = "sparse MLA reads rows of 576 values here, FP8 with one scale or bf16, not 656 B"
        return (Refusal("rocm", "kv:fp8_ds_mla", reason, "--kv-cache-dtype fp8, or bfloat16"),)
    return ()
