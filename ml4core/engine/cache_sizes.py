"""How large the pools are, from flags and from what will be wanted; errors name the values that
would fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from ml4core.api import Deployment, KVLayout
from ml4core.engine import resolve
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.kv_pool import KVPlan, plan_pools


def plan_caches(
    args: EngineArgs,
    deployment: Deployment,
    private: Mapping[str, KVLayout],
    sequences: int,
    tokens_each: int | None,
) -> KVPlan:
    """Pools for up to ``max_num_seqs`` of ``sequences`` sequences of ``tokens_each`` tokens.

    With ``--kv-cache-memory-bytes`` the pools take that much. Raises ``RequestError`` if one
    sequence doesn't fit, or if the pools, weights and device memory don't go together.
    """
    wanted = min(tokens_each or deployment.max_model_len, deployment.max_model_len)
    count = max(1, min(sequences, deployment.max_num_seqs))
    layouts = {
        "latent": private.get(deployment.kv_layout) or resolve.latent(deployment),
        "index": private.get(deployment.index_layout) or resolve.index(deployment),
    }
    size = deployment.block_size
    plan = plan_pools(deployment.model, layouts, size, wanted, count)
    page_bytes = plan.bytes_per_token * size
    budget = args.kv_cache_memory_bytes
    if budget is not None:
        pages = budget // page_bytes
        need = -(-wanted // size) + 1
        if pages < need:
            fits = max(0, pages - 1) * size
            longest = f"--max-model-len {fits} or less" if fits else "a smaller --block-size"
            raise RequestError(
                "--kv-cache-memory-bytes",
                budget,
                f"at least {need * page_bytes} for one sequence of {wanted} tokens, or {longest}",
            )
        return plan_pools(deployment.model, layouts, size, (pages - 1) * size, 1)
    memory = int(deployment.device.memory_bytes * deployment.gpu_memory_utilization)
    room = memory - deployment.weight_bytes
    if memory and plan.nbytes > room:
        fits = max(0, room // page_bytes - 1) // count * size
        remedy = f"--max-model-len {fits} or less" if fits else "a device with more memory"
        raise RequestError(
            "--max-model-len",
            wanted,
            f"{remedy}: {count} x {wanted} tokens need {plan.nbytes} bytes of caches, and beside "
            f"{deployment.weight_bytes} "
            f"bytes of weights there are {max(room, 0)} (--gpu-memory-utilization "
            f"{deployment.gpu_memory_utilization})",
        )
    return plan
