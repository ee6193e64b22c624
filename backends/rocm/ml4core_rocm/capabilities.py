"""What the rocm backend can do on a device, and what no version of it will."""

from __future__ import annotations

from ml4core.api import WEIGHT_FORMATS, Capabilities, Deployment, Device, Refusal
from ml4core_rocm import inputs_stage, own_stages
from ml4core_rocm.devices import FLAVOUR, SERVED
from ml4core_rocm.ops import OWN

LATENT = {"e4m3fn": "e4m3", "e4m3fnuz": "e4m3fnuz"}
"""Flavour of FP8 -> the latent layout of 576 bytes a row whose values it has."""

_COMMON = frozenset(
    {f"op:{name}" for name in OWN}
    | {"kv:bf16", "kv:fp32", "index:tiled16_f32", "index:planar_f32", "index:fp32"}
    | {f"weights:{name}" for name in WEIGHT_FORMATS}
    | {"act:bf16", "act:fp32", "feature:compose", "feature:prefix_caching"}
    | {"feature:load_time_mxfp4"}
    | {"spec:dspark", "spec:probabilistic_drafts", "spec:block_verification"}
    | {"parallel:tp", "parallel:ep"}
)
STAGES = {
    "attn_inputs": frozenset(inputs_stage.OPS),
    "select": frozenset(own_stages.OPS["select"]),
    "sparse_mla": frozenset(own_stages.OPS["sparse_mla"]),
}
"""Stage that a kernel of ours serves -> the ops that its parts are."""
_ACTS = {"gfx950": ("fp8_block", "mxfp4"), "gfx942": ("fp8_block",)}
"""Formats to which products of ours bring their inputs. gfx942 has no scaled matrix instruction."""

_BY_ARCH = {"gfx950": frozenset({"feature:latency_decode"})}
"""``feature:latency_decode``: the switch is known here, and answered by its guards."""


def capabilities(device: Device) -> Capabilities:
    """By architecture and kind; nothing for an architecture that the kernels aren't made for."""
    if device.arch not in SERVED:
        return Capabilities(frozenset())
    fp8 = LATENT[FLAVOUR[device.arch]]
    features = _COMMON | {f"kv:{fp8}"} | _BY_ARCH.get(device.arch, frozenset())
    real = device.kind == "real"
    if device.kind != "fake" and {"gemm", "moe_experts"} <= set(OWN):
        features |= {f"act:{name}" for name in _ACTS[device.arch]}
    if device.kind != "fake":
        features |= {f"stage:{stage}" for stage, ops in STAGES.items() if ops <= set(OWN)}
    if real:
        features |= {"feature:async_scheduling", "feature:graph_capture"}
    defaults = {
        "dtype": "bfloat16",
        "kv": fp8,
        "fp8": fp8,
        "index": "tiled16_f32",
        "block_size": "64",
        "max_num_seqs": "256" if real else "4",
        "max_num_batched_tokens": "8192" if real else "64",
    }
    return Capabilities(features, defaults, {"max_topk": 4096, "max_heads": 128})


def layout_refusals(deployment: Deployment) -> list[Refusal]:
    """Reasons that lie in the hardware and in the row that its kernels read."""
    arch, kv = deployment.device.arch, deployment.kv_layout
    remedy = "--kv-cache-dtype fp8, or bfloat16"
    native = LATENT.get(FLAVOUR.get(arch, ""))
    if kv in LATENT.values() and native is not None and kv != native:
        reason = f"{arch} computes with the FP8 flavour of {native}"
        return [Refusal("rocm", f"kv:{kv}", reason, remedy)]
    if kv == "fp8_ds_mla":
        reason = "sparse MLA reads rows of 576 values here, FP8 with one scale or bf16, not 656 B"
        return [Refusal("rocm", "kv:fp8_ds_mla", reason, remedy)]
    return []
