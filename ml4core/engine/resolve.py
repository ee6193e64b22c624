"""From flags, a checkpoint and a chosen backend to a ``Deployment``."""

from __future__ import annotations

from collections.abc import Iterable

from ml4core.api import Capabilities, Deployment, Device, KVLayout, ModelSpec, Refusal
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.engine import graph_capture, switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.replicas.launch import address_of
from ml4core.engine.speculative_config import KEYS, SpeculativeConfig, speculative_config
from ml4core.planning.kv import DRAFT_LAYOUT

_KV_BY_FLAG = {
    **{"bfloat16": "bf16", "float32": "fp32"},
    **{"fp8_ds_mla": "fp8_ds_mla", "nvfp4_ds_mla": "nvfp4_ds_mla"},
}
"""--kv-cache-dtype values that mean one layout everywhere. ``auto``, ``fp8`` and ``fp8_e4m3`` are
the backend's, as are the private ones, which are named by their ids.
"""

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192
BLOCK_SIZE = 64
"""Sequences that run together, rows of a step and tokens a page, where neither a flag nor the
backend says otherwise.
"""

HOST_OFFLOAD = "HiSparseConnector"
"""The connector that keeps pages in the host's memory; others move them between engines."""

PRIVATE = "x-"
"""How ids of private layouts begin."""

_STEP_OPS = (
    "embed",
    "rms_norm",
    "all_reduce_rms_norm",
    "gemm",
    "head_gemm",
    "silu_mul",
    "kv_write",
    "sample",
)


def kv_layout_id(args: EngineArgs, capabilities: Capabilities) -> str:
    flag = args.kv_cache_dtype
    if flag in _KV_BY_FLAG:
        return _KV_BY_FLAG[flag]
    if flag.startswith(PRIVATE):
        return flag
    if flag == "auto":
        return capabilities.defaults.get("kv", "bf16")
    return capabilities.defaults.get("fp8", "fp8_ds_mla")


def index_layout_id(args: EngineArgs, capabilities: Capabilities, kv_layout: str) -> str:
    """The flag's, else the backend's; the reference latent layout brings the reference index
    layout.
    """
    asked = args.attention_config.get("index_layout")
    if asked is not None:
        return str(asked)
    if kv_layout == "fp32" and "index:fp32" in capabilities:
        return "fp32"
    return capabilities.defaults.get("index", "planar_f32")


def speculation(args: EngineArgs, spec: ModelSpec) -> SpeculativeConfig | None:
    """How drafts are made and judged; None if nothing asks for them, or no drafter is there."""
    known = {key: value for key, value in args.speculative_config.items() if key in KEYS}
    return speculative_config(known, spec.draft)


def needs(
    spec: ModelSpec, args: EngineArgs, dtype: str, kv: str, index: str, formats: Iterable[str]
) -> frozenset[str]:
    """The capability words that a deployment needs."""
    words = {f"weights:{name}" for name in formats}
    words |= {f"kv:{kv}", "act:fp32" if dtype == "float32" else "act:bf16"}
    words |= {f"op:{name}" for name in _STEP_OPS}
    if any(layer.rope for layer in spec.layers):
        words.add("op:rope")
    if any(layer.ssmax.kind != "none" for layer in spec.layers):
        words.add("op:ssmax")
    if any(layer.moe for layer in spec.layers):
        words |= {"op:router", "op:moe_experts"}
    if spec.index_owners:
        words.add(f"index:{index}")
        select = ("layer_norm", "indexer_write", "indexer_logits", "topk", "to_slots", "sparse_mla")
        words |= {f"op:{name}" for name in select}
    if any(layer.topk_source is None for layer in spec.layers):
        words.add("op:window_mla")
    for word, size in (
        ("tp", args.tensor_parallel_size),
        ("pp", args.pipeline_parallel_size),
        ("dp", args.data_parallel_size),
        ("dcp", args.decode_context_parallel_size),
        ("pcp", args.prefill_context_parallel_size),
        ("multi_node", args.nnodes),
    ):
        if size > 1:
            words.add(f"parallel:{word}")
    if args.enable_expert_parallel:
        words.add("parallel:ep")
    if (drafts := speculation(args, spec)) is not None:
        words |= drafts.needs | {f"kv:{DRAFT_LAYOUT}"}
    if spec.vision is not None:
        words.add("stage:vision_encoder")
    words |= switches.needs(args.additional_config)
    if args.kv_transfer_config:
        offload = args.kv_transfer_config.get("kv_connector") == HOST_OFFLOAD
        words.add("feature:host_offload" if offload else "feature:kv_transfer")
    if args.enable_prefix_caching:
        words.add("feature:prefix_caching")
    if graph_capture.capture_sizes(args.cudagraph_capture_sizes, args.compilation_config):
        words.add("feature:graph_capture")
    if args.async_scheduling:
        words.add("feature:async_scheduling")
    return frozenset(words)


def resolve(
    args: EngineArgs,
    spec: ModelSpec,
    weight_formats: frozenset[str],
    weight_bytes: int,
    device: Device,
    capabilities: Capabilities,
) -> Deployment:
    """The deployment that these flags ask for. Raises ``RequestError`` for a value that can't be.

    ``weight_formats`` and ``weight_bytes`` are those of the checkpoint's matrices and tensors, as
    they are once loaded.
    """
    dtype = capabilities.defaults.get("dtype", "bfloat16") if args.dtype == "auto" else args.dtype
    low = args.additional_config.get(switches.ACTIVATIONS)
    if low is not None and dtype != "bfloat16":
        flag = f"{switches.FLAG} {switches.ACTIVATIONS}"
        raise RequestError(flag, low, f"--dtype bfloat16: inputs in {dtype} are never quantised")
    kv = kv_layout_id(args, capabilities)
    index = index_layout_id(args, capabilities, kv)
    max_model_len = args.max_model_len or spec.max_position
    if max_model_len > spec.max_position:
        raise RequestError(
            "--max-model-len",
            max_model_len,
            f"at most {spec.max_position}, the model's longest context",
        )
    drafts = speculation(args, spec)
    sequences, rows = step_limits(args, capabilities, drafts.window if drafts else 1)
    block_size = args.block_size or int(capabilities.defaults.get("block_size", BLOCK_SIZE))
    address, port = address_of(args)
    return Deployment(
        model=spec,
        device=device,
        dtype=dtype,
        kv_layout=kv,
        index_layout=index,
        weight_formats=weight_formats,
        weight_bytes=weight_bytes,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=sequences,
        max_num_batched_tokens=rows,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        data_parallel_size=args.data_parallel_size,
        data_parallel_rank=args.data_parallel_start_rank or 0,
        data_parallel_address=address,
        data_parallel_rpc_port=port,
        decode_context_parallel_size=args.decode_context_parallel_size,
        prefill_context_parallel_size=args.prefill_context_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        spanning_session="feature:spanning_session" in capabilities,
        nnodes=args.nnodes,
        enforce_eager=graph_capture.is_eager(args.enforce_eager, args.compilation_config),
        cudagraph_capture_sizes=graph_capture.capture_sizes(
            args.cudagraph_capture_sizes, args.compilation_config
        ),
        seed=args.seed,
        needs=needs(spec, args, dtype, kv, index, weight_formats),
        attention_config=args.attention_config,
        speculative_config=args.speculative_config,
        additional_config=args.additional_config,
    )


def step_limits(
    args: EngineArgs, capabilities: Capabilities | None = None, window: int = 1
) -> tuple[int, int]:
    """Sequences that run together, and rows of a step, at most: each sequence needs a row, and
    ``window`` of them to be drafted for.

    Without ``capabilities`` no backend is chosen yet.
    """
    defaults = {} if capabilities is None else capabilities.defaults
    sequences, rows = args.max_num_seqs, args.max_num_batched_tokens
    if sequences is None:
        sequences = int(defaults.get("max_num_seqs", MAX_NUM_SEQS))
        sequences = sequences if rows is None else min(sequences, rows)
    if rows is None:
        rows = int(defaults.get("max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS))
        rows = max(sequences * window, rows)
    return sequences, rows


def layout_refusals(deployment: Deployment) -> list[Refusal]:
    """Reasons against the open layouts at this model's widths and page size. A private layout is
    its backend's to judge.
    """
    found = []
    for id, make in (
        (deployment.kv_layout, lambda: latent(deployment)),
        (deployment.index_layout, lambda: index(deployment)),
    ):
        if id.startswith(PRIVATE):
            continue
        try:
            make().check_block_size(deployment.block_size)
        except ValueError as error:
            found.append(Refusal("core", f"cache layout {id}", str(error)))
    return found


def limit_refusals(spec: ModelSpec, capabilities: Capabilities) -> list[Refusal]:
    """Where the model goes beyond an upper bound that the backend declares."""
    sizes = {
        "max_topk": ("index top-k", [i.topk for layer in spec.layers if (i := layer.indexer)]),
        "max_heads": ("query heads", [layer.heads for layer in spec.layers]),
    }
    found = []
    for name, (what, values) in sizes.items():
        limit, largest = capabilities.limits.get(name), max(values, default=0)
        if limit is not None and largest > limit:
            reason = f"the model has {largest} {what}, and the backend declares {limit} at most"
            found.append(Refusal("core", name, reason))
    return found


def latent(deployment: Deployment) -> KVLayout:
    """The open latent layout at the model's widths: rows of layers without rope have the rope slot
    too.
    """
    layers = deployment.model.layers
    rope = max(layer.rope_dim for layer in layers)
    return latent_layout(deployment.kv_layout, layers[0].kv_lora_rank, rope)


def index(deployment: Deployment) -> KVLayout:
    """The open index layout at the model's head dim; 128 if no layer has an indexer."""
    dims = [layer.indexer.head_dim for layer in deployment.model.layers if layer.indexer]
    return index_layout(deployment.index_layout, dims[0] if dims else 128)
