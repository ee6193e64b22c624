"""How large the pools are, from flags and from what will be wanted; errors name the values that
would fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from ml4core.api import Deployment, KVLayout, Refusal, Refused
from ml4core.engine import resolve
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.planning import kv


def plan_caches(
    args: EngineArgs,
    deployment: Deployment,
    private: Mapping[str, KVLayout],
    sequences: int,
    tokens_each: int | None,
) -> kv.Pools:
    """Pools for up to ``max_num_seqs`` of ``sequences`` sequences of ``tokens_each`` tokens.

    With ``--kv-cache-memory-bytes`` the pools take that much. Raises ``RequestError`` if one
    sequence doesn't fit, or if the pools, weights and device memory don't go together; ``Refused``
    if a private layout is missing.
    """
    wanted = min(tokens_each or deployment.max_model_len, deployment.max_model_len)
    count = max(1, min(sequences, deployment.max_num_seqs))
    layouts = _layouts(deployment, private)
    groups = kv.target_groups(deployment.model, layouts)
    if deployment.model.draft is not None:
        groups = (*groups, kv.draft_group(deployment.model.draft))
    size, ranks = deployment.block_size, deployment.decode_context_parallel_size
    page_bytes = sum(group.page_bytes(size) for group in groups if group.window is None)
    budget, memory = args.kv_cache_memory_bytes, deployment.device.memory_bytes
    if budget is not None:
        beside = max(0, memory - deployment.weight_bytes)
        if memory and budget > beside:
            raise RequestError(
                "--kv-cache-memory-bytes",
                budget,
                f"at most {beside}: the device has {memory} bytes, and the weights take "
                f"{deployment.weight_bytes}",
            )
        one = kv.pools_for(groups, size, wanted, 1, ranks)
        pools = kv.pools_within(groups, size, budget, count, wanted, ranks)
        if pools is None or not pools.requests(wanted):
            fits = 0 if pools is None else pools.tokens
            longest = f"--max-model-len {fits} or less" if fits else "a smaller --block-size"
            raise RequestError(
                "--kv-cache-memory-bytes",
                budget,
                f"at least {one.nbytes} for one sequence of {wanted} tokens, or {longest}",
            )
        return pools
    pools = kv.pools_for(groups, size, wanted, count, ranks)
    room = int(memory * deployment.gpu_memory_utilization) - deployment.weight_bytes
    if memory and pools.nbytes > room:
        windowed = sum(pools.bytes_of(group) for group in groups if group.window is not None)
        pages = max(0, (room - windowed) // page_bytes - kv.NULL_PAGES) // count  # each sequence's
        fits = pages * size * ranks
        remedy = f"--max-model-len {fits} or less" if fits else "a device with more memory"
        raise RequestError(
            "--max-model-len",
            wanted,
            f"{remedy}: {count} x {wanted} tokens need {pools.nbytes} bytes of caches, and beside "
            f"{deployment.weight_bytes} "
            f"bytes of weights there are {max(room, 0)} (--gpu-memory-utilization "
            f"{deployment.gpu_memory_utilization})",
        )
    return pools


def _layouts(deployment: Deployment, private: Mapping[str, KVLayout]) -> dict[str, KVLayout]:
    """By group. Raises ``Refused`` for private ones that the session doesn't bring, or brings for
    rows of another width than the model's.
    """
    chosen = {"latent": deployment.kv_layout, "index": deployment.index_layout}
    names = ", ".join(private) or "none"
    lacking = [
        Refusal("core", f"cache layout {id}", f"the session brings no such layout; it has {names}")
        for id in chosen.values()
        if id.startswith(resolve.PRIVATE) and id not in private
    ]
    layers = deployment.model.layers
    widths = [
        (deployment.kv_layout, layers[0].kv_lora_rank + max(layer.rope_dim for layer in layers)),
        *((deployment.index_layout, own.head_dim) for layer in layers if (own := layer.indexer)),
    ]
    for id, width in widths:
        if id in private and private[id].width != width:
            reason = f"the session's rows have {private[id].width} values, the model's {width}"
            lacking.append(Refusal("core", f"cache layout {id}", reason))
    if lacking:
        raise Refused(lacking)
    return {
        "latent": private.get(deployment.kv_layout) or resolve.latent(deployment),
        "index": private.get(deployment.index_layout) or resolve.index(deployment),
    }
