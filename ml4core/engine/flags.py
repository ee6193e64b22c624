"""The flags of an engine, with vLLM's names: one table for parser, help, checks and refusals.

``part`` names what a flag needs and this version lacks; once that has landed, the entry loses its
``part`` and nothing else changes. A class is a panel of the help text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ml4core.api import VOCABULARY
from ml4core.api.capabilities import check_words
from ml4core.engine import graph_capture, image_limits, speculative_config, switches
from ml4core.engine.flag_spec import flag, one_of

INT64_MAX = 2**63 - 1
PORT_MAX = 65535
DAY_S = 86400
SERVER_ALONE = "only a server looks at it: ml4 serve"


def _index_layout(value: object) -> str:
    """What would work in place of this id of an index layout; empty if it may exist."""
    known = ", ".join(
        sorted(w.removeprefix("index:") for w in VOCABULARY if w.startswith("index:"))
    )
    try:
        check_words([f"index:{value}"])
    except ValueError:
        return f"{known}, or x-<distribution>/<name>"
    return ""


def _private_layout(value: str) -> str:
    """What would work in place of this id of a latent layout; empty if it may be a private one."""
    works = "x-<distribution>/<name>"
    try:
        check_words([f"kv:{value}"])
    except ValueError:
        return works
    return "" if value.startswith("x-") else works


@dataclass(frozen=True, kw_only=True)
class Model:
    backend: str = flag(
        "auto",
        "what runs the model: cpu, the name of an installed backend, or auto: the best that opens",
        metavar="NAME",
    )
    revision: str | None = flag(None, "branch, tag or commit of a hub model", metavar="NAME")
    download_dir: str | None = flag(
        None,
        "folder for what is downloaded; default: the hub's cache",
        metavar="FOLDER",
    )
    tokenizer: str | None = flag(
        None, "tekken file, or a folder with one; default: the model's", metavar="PATH"
    )
    tokenizer_mode: str = flag(
        "auto",
        "kind of tokenizer",
        choices=("auto", "mistral", "hf", "slow"),
        part="another tokenizer than mistral-common's",
        works=("auto", "mistral"),
    )
    dtype: str = flag(
        "auto",
        "type of activations and residual; auto: the backend's choice",
        choices=("auto", "bfloat16", "float32", "float16"),
        reason="every op is defined for bfloat16 and float32, none for float16",
        works=("auto", "bfloat16", "float32"),
    )
    load_format: str = flag(
        "auto",
        "how weights are stored",
        choices=("auto", "safetensors", "mistral", "dummy"),
        part="this format",
        works=("auto", "safetensors"),
    )
    quantization: str | None = flag(
        None,
        "quantize while loading",
        metavar="NAME",
        part="quantisation at loading",
        remedy="leave it out: the checkpoint's own formats are read as they are",
    )
    served_model_name: tuple[str, ...] = flag(
        (), "names that requests may use; default: MODEL", reason=SERVER_ALONE, metavar="NAME"
    )
    limit_mm_per_prompt: Mapping[str, Any] = flag(
        {},
        "most items of each modality in a prompt; key: image, for which the encoder is loaded",
        keys=image_limits.KEYS,
    )
    seed: int = flag(0, "seed of all sampling noise", minimum=0, maximum=INT64_MAX)


@dataclass(frozen=True, kw_only=True)
class Memory:
    kv_cache_dtype: str = flag(
        "auto",
        "row format of the KV cache; auto: the backend's choice; or x-<distribution>/<name>, a "
        "layout of the backend's own",
        choices=("auto", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"),
        more=_private_layout,
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "size of the KV cache; default: what requests need, or, for those that are not known yet, "
        "what is left of --gpu-memory-utilization",
        maximum=INT64_MAX,
        units=True,
    )
    num_gpu_blocks_override: int | None = flag(
        None, "pages of the KV cache, in place of a size in bytes"
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "part of the device's memory for this process: weights, steps, graphs and KV cache; where "
        "a device has memory of its own",
        minimum=0,
        maximum=1,
        exclusive=True,
    )
    block_size: int | None = flag(
        None,
        "tokens a page; default: the backend's",
    )
    max_model_len: int | None = flag(None, "longest context; default: the model's", units=True)
    max_num_seqs: int | None = flag(
        None,
        "sequences that run together at most; default: the backend's",
    )
    max_num_batched_tokens: int | None = flag(
        None, "tokens of a step at most: the prefill chunk", units=True
    )
    enable_prefix_caching: bool = flag(False, "keep pages for later prompts")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    tensor_parallel_size: int = flag(
        1, "ranks that share each matrix, each a process with a device of its own", short="-tp"
    )
    pipeline_parallel_size: int = flag(
        1, "ranks that share the layers", short="-pp", part="pipeline parallelism"
    )
    data_parallel_size: int = flag(
        1,
        "replicas of the attention, each with requests of its own; all share the routed experts, "
        "and step together",
        short="-dp",
    )
    data_parallel_size_local: int | None = flag(
        None, "replicas that this launch starts: 1, with one launch a replica"
    )
    data_parallel_start_rank: int | None = flag(None, "number of this launch's replica", minimum=0)
    data_parallel_address: str | None = flag(
        None, "host of replica 0; default: 127.0.0.1", metavar="HOST"
    )
    data_parallel_rpc_port: int | None = flag(
        None,
        "port there at which replicas meet, and agree on each step; default: 29550",
        maximum=PORT_MAX,
    )
    enable_expert_parallel: bool = flag(
        False, "whole experts on each rank, of all replicas", short="-ep"
    )
    enable_ep_weight_filter: bool = flag(
        False, "read only this rank's experts from disk, as is done in any case"
    )
    decode_context_parallel_size: int = flag(
        1, "ranks that share a context's cache", short="-dcp", part="decode context parallelism"
    )
    prefill_context_parallel_size: int = flag(
        1, "ranks that share a prompt", short="-pcp", part="prefill context parallelism"
    )
    dcp_comm_backend: str = flag(
        "ag_rs",
        "how partial results are joined",
        choices=("ag_rs", "a2a"),
        part="decode context parallelism",
    )
    dcp_q_replicate: bool = flag(
        False,
        "query projection on every rank, in place of a gather",
        part="decode context parallelism",
    )
    cp_kv_cache_interleave_size: int = flag(
        1, "consecutive tokens on one rank", part="context parallelism"
    )
    nnodes: int = flag(1, "machines in all", short="-n", part="running on several nodes")
    node_rank: int = flag(
        0, "number of this machine", short="-r", minimum=0, part="running on several nodes"
    )
    master_addr: str = flag(
        "127.0.0.1", "host of node 0", part="running on several nodes", metavar="HOST"
    )
    master_port: int = flag(
        29501, "port of node 0", maximum=PORT_MAX, part="running on several nodes"
    )
    distributed_executor_backend: str | None = flag(
        None,
        "what starts the ranks",
        choices=("uni", "mp", "ray", "external_launcher"),
        part="this launcher",
        works=("uni", "mp"),
    )
    headless: bool = flag(False, "workers only, no server", part="running on several nodes")


@dataclass(frozen=True, kw_only=True)
class Features:
    enforce_eager: bool = flag(
        False,
        "capture no graphs",
    )
    attention_config: Mapping[str, Any] = flag(
        {},
        'keys: mla_form, "auto", "absorbed" or "unabsorbed"; index_layout, an id',
        keys={"mla_form": one_of("auto", "absorbed", "unabsorbed"), "index_layout": _index_layout},
    )
    additional_config: Mapping[str, Any] = flag(
        {}, switches.HELP, keys=switches.KEYS, others=switches.backend_switches
    )
    speculative_config: Mapping[str, Any] = flag(
        {},
        'keys: method, "dspark"; num_speculative_tokens, default: the drafter\'s depth; '
        'draft_sample_method, "greedy" or "probabilistic"; rejection_sample_method, "standard" or '
        '"block"',
        keys=speculative_config.KEYS,
    )
    kv_transfer_config: Mapping[str, Any] = flag(
        {}, "connector and role", part="KV transfer and offload"
    )
    attention_backend: str | None = flag(
        None, "one provider for all attention", metavar="NAME", part="choosing a provider by flag"
    )
    compilation_config: Mapping[str, Any] = flag({}, graph_capture.HELP, keys=graph_capture.KEYS)
    cudagraph_capture_sizes: tuple[int, ...] = flag(
        (),
        "rows of the steps that are captured as graphs at the start; default: the backend's choice",
    )
    async_scheduling: bool | None = flag(
        None, "keep a step in flight; default: where the backend can"
    )
    scheduling_policy: str = flag(
        "fcfs",
        "order of waiting requests",
        choices=("fcfs", "priority"),
    )
    step_timeout_s: float = flag(
        300.0,
        "seconds after which a step that has not ended stops the engine; ten times as many for a "
        "step of a new shape, which may compile; 0: wait for ever",
        minimum=0,
        maximum=DAY_S,
    )
    tool_call_parser: str | None = flag(
        None, "format of tool calls", choices=("mistral",), reason=SERVER_ALONE
    )
    enable_auto_tool_choice: bool = flag(False, "let the model choose tools", reason=SERVER_ALONE)
    reasoning_parser: str | None = flag(
        None, "format of reasoning", choices=("mistral",), reason=SERVER_ALONE
    )
