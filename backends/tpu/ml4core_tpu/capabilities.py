"""What the tpu backend can do on a device, and what no version of it will."""

from __future__ import annotations

from ml4core.api import WEIGHT_FORMATS, Capabilities, Deployment, Device, Refusal
from ml4core_tpu.layouts import (
    LANE33,
    LANES,
    TILES,
    TILES_NOPE,
    TOGETHER,
    fits_tiles,
    widths_of,
)
from ml4core_tpu.mesh_runtime import mesh_refusals
from ml4core_tpu.ops import ACTS, INDEX_KINDS, LATENT_KINDS, OWN

SERVED = frozenset({"tpu7x"})
"""Generations that the backend is made for."""

_FEATURES = frozenset(
    {f"op:{name}" for name in OWN}
    | {f"kv:{name}" for name in LATENT_KINDS}
    | {f"index:{name}" for name in INDEX_KINDS}
    | {f"weights:{name}" for name in WEIGHT_FORMATS}
    | {f"act:{act}" for act in ("bf16", "fp32", *ACTS)}
    | {"stage:decoder_layer", "stage:vision_encoder"}
    | {"feature:compose", "feature:prefix_caching", "feature:load_time_mxfp4"}
    | {"feature:spanning_session", "parallel:tp", "parallel:ep", "parallel:dp"}
    | {"spec:dspark", "spec:probabilistic_drafts", "spec:block_verification"}
)
_SMEM_BYTES = 1 << 20
_MAX_TOPK = 4096
"""Slots of a row stand in the scalar memory twice, which is 1 MiB, beside page tables."""


def capabilities(device: Device) -> Capabilities:
    """By generation; nothing for one that the kernels aren't made for."""
    if device.arch not in SERVED:
        return Capabilities(frozenset())
    real = device.kind == "real"
    defaults = {
        "dtype": "bfloat16",
        "kv": TILES,
        "fp8": TILES,
        "index": LANE33,
        "block_size": "1024" if real else "128",
        "max_num_seqs": "128" if real else "4",
        "max_num_batched_tokens": "8192" if real else "64",
    }
    return Capabilities(_FEATURES, defaults, {"max_topk": _MAX_TOPK, "max_heads": 128})


def refusals(deployment: Deployment, capabilities: Capabilities) -> tuple[Refusal, ...]:
    """Reasons that lie in the hardware and in the rows that its kernels read."""
    kv, size = deployment.kv_layout, deployment.block_size
    found = []
    if kv == "fp8_ds_mla":
        reason = "sparse MLA reads latent and rope from two arrays here, with one scale, not 656 B"
        found.append(Refusal("tpu", "kv:fp8_ds_mla", reason, "--kv-cache-dtype fp8_e4m3"))
    if kv == "e4m3fnuz":
        reason = "TPUs convert e4m3fn; the fnuz flavour has another bias and no -0"
        found.append(Refusal("tpu", "kv:e4m3fnuz", reason, "--kv-cache-dtype fp8_e4m3"))
    if kv == TILES and size % TOGETHER:
        reason = f"a page of {size} tokens cuts a tile, which holds the rope parts of {TOGETHER}"
        found.append(Refusal("tpu", f"kv:{kv}", reason, f"--block-size {TOGETHER}, or a multiple"))
    index = deployment.index_layout
    if index == LANE33 and size % LANES:
        reason = f"a page of {size} tokens does not fill the {LANES} lanes"
        found.append(
            Refusal("tpu", f"index:{index}", reason, f"--block-size {LANES}, or a multiple")
        )
    more = (*_small_pages(deployment), *_widths(deployment), *mesh_refusals(deployment))
    return (*found, *more)


def smallest_page(max_model_len: int, max_num_seqs: int) -> int:
    """Tokens a page, a power of two, at which tables of all requests take half of the scalar memory
    at most.
    """
    pages = max(1, _SMEM_BYTES // 2 // 4 // max(1, max_num_seqs))
    tokens = -(-max_model_len // pages)
    return 1 << max(0, tokens - 1).bit_length()


def _small_pages(deployment: Deployment) -> list[Refusal]:
    size = deployment.block_size
    least = smallest_page(deployment.max_model_len, deployment.max_num_seqs)
    if deployment.device.kind != "real" or size >= least:
        return []
    reason = (
        f"page tables of {deployment.max_num_seqs} requests of {deployment.max_model_len} tokens "
        f"in pages of {size} take more than half of the scalar memory, which is 1 MiB"
    )
    remedy = f"--block-size {least}, or fewer tokens by --max-model-len or --max-num-seqs"
    return [Refusal("tpu", "--block-size", reason, remedy)]


def _widths(deployment: Deployment) -> list[Refusal]:
    """Reasons that lie in the model's sizes."""
    latent, rope = widths_of(deployment.model)
    layers = deployment.model.layers if deployment.model else ()
    dims = {layer.indexer.head_dim for layer in layers if layer.indexer}
    tiled = deployment.kv_layout in (TILES, TILES_NOPE)
    found = []
    if tiled and not fits_tiles(latent, rope):
        reason = (
            f"tiles hold latents of a multiple of {LANES} values and rope parts of {LANES} at "
            f"most; the model has {latent} and {rope}"
        )
        found.append(
            Refusal("tpu", f"kv:{deployment.kv_layout}", reason, "--kv-cache-dtype bfloat16")
        )
    if deployment.kv_layout == TILES_NOPE and layers and rope:
        reason = f"its rows have no rope part, and layers of the model have {rope} rope values"
        found.append(Refusal("tpu", f"kv:{TILES_NOPE}", reason, "--kv-cache-dtype fp8_e4m3"))
    if deployment.index_layout == LANE33 and dims - {LANES}:
        reason = f"its keys have {LANES} values; those of the model have {sorted(dims)}"
        found.append(Refusal("tpu", f"index:{LANE33}", reason))
    return found
