"""What the cuda backend can do on a device, and what no version of it will."""

from __future__ import annotations

from ml4core.api import WEIGHT_FORMATS, Capabilities, Deployment, Device, Refusal
from ml4core_cuda.ffn_stage import ACTS
from ml4core_cuda.ops import OWN

SERVED = frozenset({"sm_90", "sm_100"})
"""Architectures that the backend is made for."""

LATENTS = ("fp8_ds_mla", "e4m3", "bf16", "fp32")
"""Layouts of latents that kernels read."""

KEYS = ("planar_f32", "planar_ue8m0x4", "fp32")
"""Layouts of index keys that kernels read; the second one's scales are sm_100's."""

_COMMON = frozenset(
    {f"op:{name}" for name in OWN}
    | {"stage:attn_inputs", "stage:select", "stage:sparse_mla", "stage:attn_output", "stage:ffn"}
    | {"stage:decoder_layer", "feature:latency_decode"}
    | {f"kv:{name}" for name in LATENTS}
    | {f"index:{name}" for name in ("planar_f32", "fp32")}
    | {f"weights:{name}" for name in WEIGHT_FORMATS}
    | {f"act:{name}" for name in ("bf16", "fp32", *ACTS)}
    | {"feature:compose", "feature:prefix_caching"}
    | {"spec:dspark", "spec:probabilistic_drafts", "spec:block_verification"}
    | {"parallel:tp", "parallel:ep"}
)
_BY_ARCH = {"sm_100": frozenset({"index:planar_ue8m0x4"})}
_REAL = frozenset({"feature:graph_capture", "feature:async_scheduling"})
"""What needs a device that works while the host does something else."""

_MAX_TOPK = 4096
"""A tile of the top-k kernel is 16,384 scores, of which a quarter may be kept."""


def capabilities(device: Device) -> Capabilities:
    """By architecture and kind; nothing for an architecture that the kernels aren't made for."""
    if device.arch not in SERVED:
        return Capabilities(frozenset())
    features = _COMMON | _BY_ARCH.get(device.arch, frozenset())
    if device.kind == "real":
        features |= _REAL
    defaults = {
        "dtype": "bfloat16",
        "kv": "fp8_ds_mla",
        "fp8": "fp8_ds_mla",
        "index": "planar_f32",
        "block_size": "64",
        "max_num_seqs": "256" if device.kind == "real" else "4",
        "max_num_batched_tokens": "8192" if device.kind == "real" else "64",
    }
    return Capabilities(features, defaults, {"max_topk": _MAX_TOPK, "max_heads": 128})


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
