"""What the tpu backend can do on a device, and what no version of it will."""

from __future__ import annotations

from ml4core.api import Capabilities, Deployment, Device, Refusal

SERVED = frozenset({"tpu7x"})
"""Generations that the backend is made for."""

_LANES = 128
"""Width of a vector register's last axis."""


def capabilities(device: Device) -> Capabilities:
    """Nothing yet: no kernel serves any word of the vocabulary."""
    return Capabilities(frozenset())


def refusals(deployment: Deployment, capabilities: Capabilities) -> tuple[Refusal, ...]:
    """Reasons that lie in the hardware and in the rows that its kernels read."""
    kv = deployment.kv_layout
    found = []
    if kv == "fp8_ds_mla":
        reason = "sparse MLA reads latent and rope from two arrays here, with one scale, not 656 B"
        found.append(Refusal("tpu", "kv:fp8_ds_mla", reason, "--kv-cache-dtype fp8_e4m3"))
    if kv == "e4m3fnuz":
        reason = "TPUs convert e4m3fn; the fnuz flavour has another bias and no -0"
        found.append(Refusal("tpu", "kv:e4m3fnuz", reason, "--kv-cache-dtype fp8_e4m3"))
    if deployment.index_layout == "lane33_ue8m0" and deployment.block_size % _LANES:
        reason = f"a page of {deployment.block_size} tokens does not fill the {_LANES} lanes"
        found.append(
            Refusal("tpu", "index:lane33_ue8m0", reason, f"--block-size {_LANES}, or a multiple")
        )
    return tuple(found)
