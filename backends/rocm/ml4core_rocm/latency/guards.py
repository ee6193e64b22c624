"""Every reason against the specialised decode in a deployment. None hides another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from ml4core.api import Deployment, LayerSpec, Refusal
from ml4core_rocm.devices import CUS
from ml4core_rocm.switches import Switches

SWITCH, WORD = "decode_backend", "latency_specialized"
PROVIDER = "latency-specialised decode"
KERNEL: str | None = None
"""Version of the gfx950 kernel; None: this version has none."""

TENSOR_PARALLEL = 4
ARCH = "gfx950"
BLOCK_SIZE = 64
MAX_VERIFY_ROWS = 8
KV_LAYOUTS = ("e4m3", "bf16")
INDEX_LAYOUT = "tiled16_f32"
LEAVE_OUT = f"leave {SWITCH} out"

SHAPE: Mapping[str, int] = MappingProxyType(
    {
        "hidden_size": 6144,
        "kv_lora_rank": 512,
        "v_dim": 128,
        "experts": 128,
        "experts a token": 4,
        "expert width": 6144,
        "shared width": 6144,
        "index heads": 32,
        "index head dim": 128,
        "index top-k": 2048,
    }
)
"""Widths that the kernel is built for, of the whole model."""
HEADS = 64
ROPE_DIMS = (0, 64)

Guard = Callable[[Deployment, Switches], Iterator[Refusal]]


def asked(deployment: Deployment) -> bool:
    return deployment.additional_config.get(SWITCH) == WORD


def config_reasons(deployment: Deployment, switches: Switches) -> tuple[Refusal, ...]:
    """All reasons of a deployment that asks for it, in the order of ``GUARDS``; the kernel's, if
    there is none, comes last. Nothing for one that doesn't ask.
    """
    if not asked(deployment):
        return ()
    return tuple(one for guard in GUARDS.values() for one in guard(deployment, switches))


def _no(name: str, reason: str, remedy: str = LEAVE_OUT) -> Refusal:
    return Refusal("rocm", f"{WORD}, {name}", reason, remedy)


def _tensor_parallel(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    size = deployment.tensor_parallel_size
    if size != TENSOR_PARALLEL:
        reason = f"it is built for {TENSOR_PARALLEL} tensor-parallel ranks, not {size}"
        yield _no("--tensor-parallel-size", reason, f"--tensor-parallel-size {TENSOR_PARALLEL}")


def _single(name: str, attribute: str, why: str) -> Guard:
    def guard(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
        size = getattr(deployment, attribute)
        if size > 1:
            yield _no(name, f"{why}, and this is {size}", f"{name} 1")

    return guard


def _experts_whole(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    if deployment.enable_expert_parallel:
        reason = "each rank has a part of every expert there, not whole experts"
        yield _no("--enable-expert-parallel", reason, "--no-enable-expert-parallel")


def _transfer(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    reason = "its kernel reads the cache in place for as long as a step takes"
    for word in ("feature:kv_transfer", "feature:host_offload"):
        if word in deployment.needs:
            name = "--kv-transfer-config"
            yield _no(name, f"{reason}, and {word} moves pages meanwhile", f"leave {name} out")


def _speculation(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    config = deployment.speculative_config
    method = config.get("method")
    if config and method != "dspark":
        reason = f"a verify block is one of dspark, not of {method!r}"
        yield _no("--speculative-config method", reason, "dspark, or no drafts")
    drafts = config.get("num_speculative_tokens")
    if isinstance(drafts, int) and drafts + 1 > MAX_VERIFY_ROWS:
        reason = f"a verify block has {MAX_VERIFY_ROWS} rows at most, not {drafts + 1}"
        works = f"1 to {MAX_VERIFY_ROWS - 1}"
        yield _no("--speculative-config num_speculative_tokens", reason, works)


def _experts(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    formats = deployment.weight_formats
    if "mxfp4" not in formats or switches.expert_act != "a4w4":
        weights = "MXFP4" if "mxfp4" in formats else "no MXFP4"
        reason = (
            f"experts are to be MXFP4 with activations of MXFP4 (a4w4); this has {weights} weights "
            f"and {switches.expert_act or 'unquantised'} activations"
        )
        works = "VLLM_FP8_MOE_REQUANT=mxfp4 VLLM_FP8_MOE_REQUANT_ACT=a4w4"
        yield _no("VLLM_FP8_MOE_REQUANT_ACT", reason, works)


def _dtype(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    if deployment.dtype != "bfloat16":
        yield _no("--dtype", f"its rows are bfloat16, not {deployment.dtype}", "--dtype bfloat16")


def _caches(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    if deployment.kv_layout not in KV_LAYOUTS:
        reason = f"it reads latents of {' or '.join(KV_LAYOUTS)}, not of {deployment.kv_layout}"
        yield _no("--kv-cache-dtype", reason, "--kv-cache-dtype fp8, or bfloat16")
    if deployment.index_layout != INDEX_LAYOUT:
        reason = f"it reads index keys of {INDEX_LAYOUT}, not of {deployment.index_layout}"
        yield _no("--attention-config index_layout", reason, INDEX_LAYOUT)
    if deployment.block_size != BLOCK_SIZE:
        reason = f"pages are of {BLOCK_SIZE} tokens, not of {deployment.block_size}"
        yield _no("--block-size", reason, f"--block-size {BLOCK_SIZE}")


def _device(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    device = deployment.device
    if device.kind != "real":
        reason = f"a persistent kernel needs a GPU; the device is of kind {device.kind}"
        yield _no("device", reason, "a device of kind real")
    if device.arch != ARCH:
        reason = f"it is made for {ARCH}, not for {device.arch}"
        yield _no("architecture", reason, "an MI350X or MI355X")
    elif device.kind == "real":
        found, wanted = device.details.get("cus", ""), CUS[ARCH]
        if found != str(wanted):
            reason = (
                f"one workgroup is to run on each of {wanted} compute units, and this GPU has "
                f"{found or 'an unknown number'}: on a part of a GPU it would wait for ever"
            )
            yield _no("compute units", reason, "an unpartitioned GPU (SPX)")


def _model(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    wrong = sorted({text for layer in deployment.model.layers for text in _misfits(layer)})
    if wrong:
        reason = f"it is built for Mistral Large 4's widths; this model has {'; '.join(wrong)}"
        yield _no("model", reason)


def _misfits(layer: LayerSpec) -> Iterator[str]:
    found: dict[str, int] = {
        "hidden_size": layer.hidden_size,
        "kv_lora_rank": layer.kv_lora_rank,
        "v_dim": layer.v_dim,
    }
    if (moe := layer.moe) is not None:
        found |= {"experts": moe.experts, "experts a token": moe.topk}
        found |= {"expert width": moe.expert_width, "shared width": moe.shared_width}
    if (index := layer.indexer) is not None:
        found |= {"index heads": index.heads, "index head dim": index.head_dim}
        found["index top-k"] = index.topk
    for name, value in found.items():
        if value != SHAPE[name]:
            yield f"{name} {value}, not {SHAPE[name]}"
    if layer.heads != HEADS:
        yield f"{layer.heads} heads, not {HEADS}"
    if layer.rope_dim not in ROPE_DIMS:
        yield f"rope of {layer.rope_dim} dims, not {' or '.join(map(str, ROPE_DIMS))}"
    if layer.q_lora_rank is not None:
        yield f"queries by a rank of {layer.q_lora_rank}, not straight from the hidden state"


def _kernel(deployment: Deployment, switches: Switches) -> Iterator[Refusal]:
    if KERNEL is None:
        yield _no("kernel", "no gfx950 kernel in this version")


_NODE = "peers write to each other's memory, within one node"
_CONTEXT = "every rank reads the whole context"

GUARDS: Mapping[str, Guard] = MappingProxyType(
    {
        "tensor_parallel": _tensor_parallel,
        "pipeline_parallel": _single(
            "--pipeline-parallel-size", "pipeline_parallel_size", "all layers are on each rank"
        ),
        "data_parallel": _single(
            "--data-parallel-size", "data_parallel_size", "ranks of one replica are its peers"
        ),
        "nodes": _single("--nnodes", "nnodes", _NODE),
        "expert_parallel": _experts_whole,
        "decode_context": _single(
            "--decode-context-parallel-size", "decode_context_parallel_size", _CONTEXT
        ),
        "prefill_context": _single(
            "--prefill-context-parallel-size", "prefill_context_parallel_size", _CONTEXT
        ),
        "transfer": _transfer,
        "speculation": _speculation,
        "experts": _experts,
        "dtype": _dtype,
        "caches": _caches,
        "device": _device,
        "model": _model,
        "kernel": _kernel,
    }
)
"""In the order in which reasons are told."""


def kernel_reasons(facts: Sequence[tuple[str, Mapping[str, int]]]) -> tuple[Refusal, ...]:
    """Reasons in what was compiled, for each width by name: ``scratch_bytes``, ``lds_bytes``, and
    ``workgroups_per_cu`` as the runtime tells them for the device.
    """
    found = []
    for name, fact in facts:
        if fact["scratch_bytes"]:
            reason = f"it spills {fact['scratch_bytes']} bytes a lane to memory"
            found.append(_no(f"kernel {name}", reason))
        if fact["lds_bytes"] > LDS_BYTES:
            reason = f"it needs {fact['lds_bytes']} bytes of LDS, of {LDS_BYTES}"
            found.append(_no(f"kernel {name}", reason))
        if fact["workgroups_per_cu"] < 1:
            reason = "not every workgroup would be resident, and those that are would wait for ever"
            found.append(_no(f"kernel {name}", reason))
    return tuple(found)


LDS_BYTES = 160 << 10
"""Of a compute unit of gfx950."""
