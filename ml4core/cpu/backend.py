"""The cpu backend: what it declares, and how it opens."""

from __future__ import annotations

import os
import platform

from ml4core.api import (
    OPS,
    WEIGHT_FORMATS,
    Capabilities,
    Deployment,
    Device,
    Probe,
    Session,
    refuse_missing,
)

_FEATURES = frozenset(
    {f"op:{name}" for name in OPS}
    | {f"kv:{name}" for name in ("fp8_ds_mla", "e4m3", "e4m3fnuz", "bf16", "fp32", "nvfp4_ds_mla")}
    | {f"index:{name}" for name in ("planar_f32", "tiled16_f32", "lane33_ue8m0", "fp32")}
    | {f"weights:{name}" for name in WEIGHT_FORMATS}
    | {"act:fp32", "act:bf16", "feature:compose", "feature:deterministic"}
    | {"feature:prefix_caching", "feature:load_time_mxfp4"}
    | {"spec:dspark", "spec:probabilistic_drafts", "spec:block_verification"}
    | {"parallel:tp", "parallel:ep", "parallel:dp"}
)


class CpuBackend:
    """Torch on the host's cores. ``auto`` takes it last."""

    name = "cpu"
    priority = 0

    def probe(self) -> Probe:
        import torch

        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        memory = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else 0
        details = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
        machine = platform.machine() or "unknown"
        name = platform.processor() or machine
        return Probe((Device("real", name, machine, "cpu", memory_bytes=memory, details=details),))

    def capabilities(self, device: Device) -> Capabilities:
        defaults = {
            "dtype": "float32",
            "kv": "fp32",
            "fp8": "fp8_ds_mla",
            "index": "planar_f32",
            "block_size": "64",
            "max_num_seqs": "16",
            "max_num_batched_tokens": "512",
        }
        return Capabilities(_FEATURES, defaults)

    def open(self, deployment: Deployment) -> Session:
        refuse_missing(deployment, self.capabilities(deployment.device), self.name)
        from ml4core.cpu.session import CpuSession

        return CpuSession(deployment)
