"""Who serves what where AITER is asked for: its functions by part, what stands against each, and
ours where it can't.

Without ``VLLM_ROCM_USE_AITER=1`` every part is ours, or core's composition where there is none of
ours. With it, a part is AITER's where nothing stands against it: that is what was asked for, and no
measurement decides as yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ml4core.api import Deployment, LayerSpec, Refusal
from ml4core_rocm.devices import FLAVOUR
from ml4core_rocm.switches import AR_WORLDS, VARIABLES, Switches

OURS = "triton"
RAGGED = "triton ragged MLA"
"""Ours for layers without rope on a bf16 cache, beside AITER's attention for the others."""
_SOURCE = "rocm"
TOPK, CHUNK = 2048, 256
"""Keys that its top-k keeps, and those of a chunk of its paged scores."""
PROMPT_KEYS = 32768
"""Keys of a request from which its top-k of rows of prompts pays, as published."""
LATENT, ROPE, HEADS = 512, 64, 128
"""Values of the rows that its attention reads, and the most heads of a rank."""
UNITS: Mapping[str, int] = MappingProxyType({"a4w4": 256, "a8w4": 256, "fp8_block": 128})
"""What experts' widths are multiples of there, by what inputs and weights are."""

Against = Callable[[LayerSpec | None, Deployment, Switches], Iterator[Refusal]]


@dataclass(frozen=True)
class Peer:
    """AITER's way for a stage, an op or a collective, or ours beside it.

    Attributes:
        name: as the start-up report calls it.
        functions: what its adapter calls, by the names of ``aiter_functions``.
        against: reasons that lie in the layer or the deployment.
    """

    name: str
    part: str
    functions: tuple[str, ...]
    against: Against

    def reasons(
        self,
        layer: LayerSpec | None,
        deployment: Deployment,
        switches: Switches,
        installed: Callable[[tuple[str, ...]], tuple[Refusal, ...]],
    ) -> tuple[Refusal, ...]:
        """Everything against it; nothing, if it is asked for and can serve. ``installed`` says
        what is wrong with functions of the library, and is asked only if it is.
        """
        found = list(self.against(layer, deployment, switches))
        if not switches.use_aiter:
            variable = VARIABLES["use_aiter"]
            found.append(Refusal(_SOURCE, self.name, f"{variable} is not 1", f"{variable}=1"))
        else:
            found += installed(self.functions)
        return tuple(found)


def _bf16(name: str, deployment: Deployment) -> Iterator[Refusal]:
    if deployment.dtype != "bfloat16":
        reason = f"its rows are bfloat16, not {deployment.dtype}"
        yield Refusal(_SOURCE, name, reason, "--dtype bfloat16")


def _mla(layer: LayerSpec | None, deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    name, arch = "AITER MLA", deployment.device.arch
    if layer is not None and layer.topk_source is None:
        yield Refusal(_SOURCE, name, "its sparse decoding serves layers that choose their keys")
    if layer is not None:
        if layer.kv_lora_rank != LATENT or layer.rope_dim not in (0, ROPE):
            reason = (
                f"it reads rows of {LATENT} values and {ROPE} of rope, and those of the model have "
                f"{layer.kv_lora_rank} and {layer.rope_dim}"
            )
            yield Refusal(_SOURCE, name, reason, OURS)
        if layer.heads > HEADS:
            reason = f"it attends with {HEADS} heads a rank at most, not {layer.heads}"
            yield Refusal(_SOURCE, name, reason, "a greater --tensor-parallel-size")
        if layer.rope_dim == 0 and deployment.kv_layout == "bf16":
            reason = (
                f"it reads {LATENT + ROPE} values of a row of bf16, of which a layer without rope "
                f"has {LATENT}; the ragged Triton kernel reads those"
            )
            yield Refusal(_SOURCE, name, reason, RAGGED)
    native = "e4m3" if FLAVOUR.get(arch) == "e4m3fn" else "e4m3fnuz"
    if deployment.kv_layout not in ("bf16", native):
        reason = f"on {arch} it reads rows of bf16 or {native}, not of {deployment.kv_layout}"
        yield Refusal(_SOURCE, name, reason, "--kv-cache-dtype fp8, or bfloat16")
    yield from _bf16(name, deployment)
    if switches.aiter_triton_sparse_mla:
        reason = f"{VARIABLES['aiter_triton_sparse_mla']} wants the Triton kernel in its place"
        yield Refusal(_SOURCE, name, reason, f"{VARIABLES['aiter_triton_sparse_mla']}=0")


def _triton_mla(
    layer: LayerSpec | None, deployment: Deployment, switches: Switches
) -> Iterator[Refusal]:
    name = "AITER Triton sparse MLA"
    reason = (
        "it gives no log-sum-exp, which the stage returns; ours has the same form: ragged, without "
        "padded heads, without queries in FP8"
    )
    yield Refusal(_SOURCE, name, reason, OURS)


def _ragged(
    layer: LayerSpec | None, deployment: Deployment, switches: Switches
) -> Iterator[Refusal]:
    if layer is not None and layer.topk_source is None:
        yield Refusal(_SOURCE, RAGGED, "it serves layers that choose their keys")
    if layer is not None and (layer.rope_dim or deployment.kv_layout != "bf16"):
        rope = f"{layer.rope_dim} dims of rope" if layer.rope_dim else "no rope"
        reason = f"it serves layers without rope on bf16; this has {rope} on {deployment.kv_layout}"
        yield Refusal(_SOURCE, RAGGED, reason)


def _select(
    layer: LayerSpec | None, deployment: Deployment, switches: Switches
) -> Iterator[Refusal]:
    name = "AITER index scores and top-k"
    index = layer.indexer if layer is not None else None
    if deployment.device.arch != "gfx950":
        reason = f"its stable top-k is made for gfx950, not for {deployment.device.arch}"
        yield Refusal(_SOURCE, name, reason, OURS)
    if index is not None and index.topk != TOPK:
        yield Refusal(_SOURCE, name, f"its top-k keeps {TOPK} keys, not {index.topk}", OURS)
    if deployment.index_layout != "tiled16_f32":
        reason = f"its paged scores read keys of tiled16_f32, not of {deployment.index_layout}"
        yield Refusal(_SOURCE, name, reason, "tiled16_f32")
    size = deployment.block_size
    if size % 16 or (CHUNK % size and size % CHUNK):
        reason = f"pages of {size} keys and its chunks of {CHUNK} don't divide one another"
        yield Refusal(_SOURCE, name, reason, "--block-size 64")
    yield from _prompts(layer, deployment)


def _prompts(layer: LayerSpec | None, deployment: Deployment) -> Iterator[Refusal]:
    """Reasons against its scores of rows of prompts, over gathered keys."""
    index = layer.indexer if layer is not None else None
    sizes = () if index is None else (index.heads, index.head_dim)
    if any(size & (size - 1) for size in sizes):
        reason = f"it scores powers of two of heads and values, and the index has {list(sizes)}"
        yield Refusal(_SOURCE, "AITER index scores and top-k", reason, OURS)


def _norms(
    layer: LayerSpec | None, deployment: Deployment, switches: Switches
) -> Iterator[Refusal]:
    yield from _bf16("AITER RMS norm", deployment)


def _sums(layer: LayerSpec | None, deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    yield from _bf16("AITER sum and RMS norm", deployment)


def _only_bf16(name: str) -> Against:
    def against(
        layer: LayerSpec | None, deployment: Deployment, switches: Switches
    ) -> Iterator[Refusal]:
        return _bf16(name, deployment)

    return against


def _latents(
    layer: LayerSpec | None, deployment: Deployment, switches: Switches
) -> Iterator[Refusal]:
    name = "AITER latent write"
    yield from _bf16(name, deployment)
    if deployment.kv_layout != "bf16":
        reason = (
            "its cast to FP8 doesn't saturate, which rows of a cache do, so it copies bf16 alone; "
            f"the cache is {deployment.kv_layout}"
        )
        yield Refusal(_SOURCE, name, reason, OURS)


def _products(
    layer: LayerSpec | None, deployment: Deployment, switches: Switches
) -> Iterator[Refusal]:
    name = "AITER block FP8 product"
    yield from _bf16(name, deployment)
    if "act:fp8_block" not in deployment.needs:
        reason = "it quantises its input to fp8_block, which this deployment doesn't ask for"
        yield Refusal(_SOURCE, name, reason)
    if FLAVOUR.get(deployment.device.arch) != "e4m3fn":
        reason = f"its adapter hands e4m3fn on, and {deployment.device.arch} computes in e4m3fnuz"
        yield Refusal(_SOURCE, name, reason, "gfx950")


def expert_mode(deployment: Deployment, switches: Switches) -> str:
    """What inputs and weights of experts are in its hands: ``a8w4``, ``a4w4`` or ``fp8_block``;
    empty where inputs stay as they are.
    """
    block = "fp8_block" if "act:fp8_block" in deployment.needs else ""
    return switches.expert_act or block


def _experts(
    layer: LayerSpec | None, deployment: Deployment, switches: Switches
) -> Iterator[Refusal]:
    name, mode = "AITER fused experts", expert_mode(deployment, switches)
    yield from _bf16(name, deployment)
    arch = deployment.device.arch
    if arch != "gfx950":
        need = "MXFP4 experts need scaled matrix instructions"
        if mode == "fp8_block":
            need = "its adapter hands experts in e4m3fn on"
        yield Refusal(_SOURCE, name, f"{need}; this is {arch}", "gfx950")
    if not mode:
        reason = "it quantises the inputs of experts, which this deployment doesn't ask for"
        works = (
            'VLLM_FP8_MOE_REQUANT=mxfp4, or --additional-config \'{"activations": "fp8_block"}\''
        )
        yield Refusal(_SOURCE, name, reason, works)
    if mode == "fp8_block" and mode not in deployment.weight_formats:
        formats = ", ".join(sorted(deployment.weight_formats))
        reason = f"beside such inputs it takes experts in fp8_block, and weights are {formats}"
        yield Refusal(_SOURCE, name, reason, OURS)
    unit = UNITS.get(mode, 128)
    ranks = 1 if deployment.enable_expert_parallel else deployment.tensor_parallel_size
    widths = {
        width
        for one in deployment.model.layers
        if one.moe is not None
        for width in (one.hidden_size, one.moe.expert_width // ranks)
    }
    if wrong := sorted(width for width in widths if width % unit):
        reason = f"its tiles are {unit} wide, and experts of a rank are {wrong}"
        yield Refusal(_SOURCE, name, reason, "another --tensor-parallel-size")
    if switches.expert_act == "a4w4" and deployment.enable_expert_parallel:
        reason = "its a4w4 experts take no mask of other ranks' experts"
        yield Refusal(_SOURCE, name, reason, "--no-enable-expert-parallel")


def _all_reduce(
    layer: LayerSpec | None, deployment: Deployment, switches: Switches
) -> Iterator[Refusal]:
    name, world = "AITER all-reduce", deployment.tensor_parallel_size
    remedy = "the collectives of torch"
    if world not in AR_WORLDS:
        reason = f"it is made for {', '.join(map(str, AR_WORLDS))} ranks, not for {world}"
        yield Refusal(_SOURCE, name, reason, remedy)
    if deployment.nnodes > 1:
        reason = f"it reaches peers of one host, and the ranks are on {deployment.nnodes}"
        yield Refusal(_SOURCE, name, reason, remedy)
    if not switches.custom_ar_max_size:
        variable = VARIABLES["custom_ar_max_size"]
        yield Refusal(_SOURCE, name, f"{variable} is 0, which turns it off", f"{variable} unset")


PEERS: tuple[Peer, ...] = (
    Peer(
        "AITER MLA",
        "sparse_mla",
        ("mla_decode_fwd", "get_mla_metadata_info_v1", "get_mla_metadata_v1"),
        _mla,
    ),
    Peer("AITER Triton sparse MLA", "sparse_mla", (), _triton_mla),
    Peer(RAGGED, "sparse_mla", (), _ragged),
    Peer(
        "AITER index scores and top-k",
        "select",
        (
            "deepgemm_fp8_paged_mqa_logits",
            "top_k_per_row_decode",
            "fp8_mqa_logits",
            "top_k_per_row_prefill",
        ),
        _select,
    ),
    Peer("AITER RMS norm", "rms_norm", ("rmsnorm2d_fwd",), _norms),
    Peer("AITER sum and RMS norm", "all_reduce_rms_norm", ("rmsnorm2d_fwd_with_add",), _sums),
    Peer("AITER block FP8 product", "gemm", ("gemm_a8w8_blockscale",), _products),
    Peer("AITER bf16 product", "gemm", ("gemm_a16w16",), _only_bf16("AITER bf16 product")),
    Peer("AITER gate", "silu_mul", ("silu_and_mul",), _only_bf16("AITER gate")),
    Peer("AITER latent write", "kv_write", ("concat_and_cache_mla",), _latents),
    Peer("AITER fused experts", "moe_experts", ("fused_moe",), _experts),
    Peer("AITER all-reduce", "all_reduce", ("CustomAllreduce",), _all_reduce),
)
"""A stage, an op or a collective, by the name of its ``part``."""


FUNCTIONS = tuple(dict.fromkeys(name for peer in PEERS for name in peer.functions))
"""All that is called of the library, and so has to fit once it is asked for."""


def peers(part: str) -> tuple[Peer, ...]:
    return tuple(peer for peer in PEERS if peer.part == part)
