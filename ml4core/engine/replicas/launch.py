"""What a launch says of its replica, and in what launches of one deployment must be alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ml4core.api import Deployment, Refusal

if TYPE_CHECKING:
    from ml4core.engine.args import EngineArgs

SIZE, LOCAL, RANK = (
    "--data-parallel-size",
    "--data-parallel-size-local",
    "--data-parallel-start-rank",
)
HOST = "127.0.0.1"
PORT = 29550
"""Where replicas meet if no flag says."""
_MOST_SHOWN = 60
"""Characters of a value in a message."""


def address_of(args: EngineArgs) -> tuple[str, int]:
    """Host and port at which replicas meet; "" and 0 for a launch with one."""
    if args.data_parallel_size == 1:
        return "", 0
    return args.data_parallel_address or HOST, args.data_parallel_rpc_port or PORT


def refusals(args: EngineArgs, serves: bool = True) -> list[Refusal]:
    """What of several replicas can't be. ``serves``: the engine steps whenever others want to."""
    size, local = args.data_parallel_size, args.data_parallel_size_local
    if size == 1:
        return []
    found = []
    alone = f"{LOCAL} 1 with {RANK} 0 to {size - 1}, one such launch for each replica"
    if local is not None and local > 1:
        reason = f"{local} replicas behind one server; a launch starts one"
        found.append(Refusal("core", f"{LOCAL} {local}", reason, alone))
    elif args.data_parallel_start_rank is None:
        reason = f"nothing says which of {size} replicas this launch is"
        found.append(Refusal("core", f"{SIZE} {size}", reason, alone))
    if not serves:
        reason = (
            "an engine for a batch steps only while it has one, and the other replicas would wait "
            "for it"
        )
        found.append(Refusal("core", f"{SIZE} {size}", reason, "ml4 serve, or AsyncLLM"))
    return found


def facts_of(args: EngineArgs, deployment: Deployment, backend: str) -> dict[str, str]:
    """What has to be alike on all replicas, by the name under which a launch says it."""
    model = deployment.model
    flags = {
        "--tensor-parallel-size": deployment.tensor_parallel_size,
        "--enable-expert-parallel": deployment.enable_expert_parallel,
        "--dtype": deployment.dtype,
        "--kv-cache-dtype": deployment.kv_layout,
        "--attention-config": _plain(deployment.attention_config),
        "--block-size": deployment.block_size,
        "--max-model-len": deployment.max_model_len,
        "--max-num-seqs": deployment.max_num_seqs,
        "--max-num-batched-tokens": deployment.max_num_batched_tokens,
        "--speculative-config": _plain(deployment.speculative_config),
        "--additional-config": _plain(deployment.additional_config),
        "--limit-mm-per-prompt": _plain(args.limit_mm_per_prompt),
        "--enforce-eager": deployment.enforce_eager,
        "--cudagraph-capture-sizes": list(deployment.cudagraph_capture_sizes),
        "--async-scheduling": args.async_scheduling,
        "--step-timeout-s": args.step_timeout_s,
        "--backend": backend,
    }
    parts = {
        "the index layout": deployment.index_layout,
        "the device's architecture": deployment.device.arch,
        "what the backend is needed for": sorted(deployment.needs),
        "the model": f"a table of {len(model.layers)} layers ({_digest(replace(model, name=''))})",
        "the bytes of the weights": deployment.weight_bytes,
        "the formats of the weights": sorted(deployment.weight_formats),
        "the version of ml4core": version("ml4core"),
    }
    return {name: str(value) for name, value in (flags | parts).items()}


def differences(replicas: Sequence[Mapping[str, Any]]) -> list[Refusal]:
    """A reason for each fact that isn't the same on all replicas, given those of each."""
    found = []
    names = dict.fromkeys(name for facts in replicas for name in facts)
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(replicas):
            holders.setdefault(str(facts.get(name, "unknown")), []).append(rank)
        if len(holders) > 1:
            reason = "; ".join(
                f"{_short(value)} on {ranks_text(ranks)}" for value, ranks in holders.items()
            )
            found.append(
                Refusal("core", name, f"replicas differ: {reason}", "the same on all replicas")
            )
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """``replica 1``, or ``replicas 0, 1 and 3``."""
    if len(ranks) == 1:
        return f"replica {ranks[0]}"
    return f"replicas {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _plain(values: Mapping[str, Any]) -> str:
    return repr(sorted(values.items(), key=lambda item: item[0])) if values else "nothing"


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=6).hexdigest()


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({_digest(text)})"
