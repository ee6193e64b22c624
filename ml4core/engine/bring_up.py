"""From a session to a model that can run: weights, caches and steps, sized and tried where the
device tells of its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ml4core.api import Deployment, Refusal, Refused, StepBuckets, VisionSpec
from ml4core.engine import resolve as resolving
from ml4core.engine.args import FLAGS, EngineArgs
from ml4core.engine.cache_sizes import Groups, Wanted, cache_groups, plan_caches
from ml4core.engine.image_limits import KEPT_ROWS
from ml4core.engine.memory_plan import UTILIZATION, check_share
from ml4core.engine.padding import StepSizes
from ml4core.engine.runner import ModelRunner
from ml4core.engine.start_up import StartUp
from ml4core.engine.steps import StepRunner
from ml4core.engine.trials import Told, Trials
from ml4core.models.pixtral_images import patch_images
from ml4core.planning.kv import Pools


class BroughtUp(NamedTuple):
    """``start``: None where the device doesn't tell of its memory."""

    pools: Pools
    start: StartUp | None = None


def bring_up(
    args: EngineArgs,
    deployment: Deployment,
    runner: ModelRunner,
    steps: StepRunner,
    wanted: Wanted,
    load: Callable[[], None],
    told: Told | None = None,
    settle: Callable[[Pools], Pools] = lambda pools: pools,
) -> BroughtUp:
    """Loads and allocates. ``load`` gives the runner its weights; ``steps`` are of its model;
    ``settle`` gives the pools for which all replicas have room.

    Raises ``Refused`` and ``RequestError`` for what can be known before it, and before anything is
    allocated; after it ``RequestError`` for caches that don't fit, and ``MemoryError``.
    """
    session = runner.session
    if runner.memory is None:
        _refuse_share(args, runner.backend)
        pools = settle(plan_caches(args, deployment, session.layouts, wanted))
        load()
        runner.allocate_kv(pools)
        return BroughtUp(pools)
    groups = cache_groups(deployment, session.layouts)
    vision = deployment.model.vision
    start = StartUp.begin(runner.memory, 0 if vision is None else _kept_images(deployment))
    sized = args.kv_cache_memory_bytes or args.num_gpu_blocks_override
    if wanted.fill and not sized:
        check_share(start.before, deployment.gpu_memory_utilization)
    with start.loading(deployment.weight_bytes):
        load()
    device = deployment.device.torch_device
    sizes = step_sizes(args, deployment, groups, wanted, getattr(session, "step_buckets", None))
    images = {} if vision is None else {"image": lambda: _encode_largest(runner, vision)}
    pools = start.run(
        runner,
        Trials(steps, sizes, device, images),
        groups,
        lambda profile: settle(plan_caches(args, deployment, session.layouts, wanted, profile)),
        warm=wanted.fill,  # what known requests need is compiled when they come
        told=told,
    )
    return BroughtUp(pools, start)


def step_sizes(
    args: EngineArgs,
    deployment: Deployment,
    groups: Groups,
    wanted: Wanted,
    buckets: StepBuckets | None,
) -> StepSizes:
    """The largest steps that come: by the scheduler's limits, and by requests that are known."""
    drafts = resolving.speculation(args, deployment.model)
    window = 1 if drafts is None else drafts.window
    sequences, tokens = deployment.max_num_seqs, deployment.max_model_len
    rows = deployment.max_num_batched_tokens
    if not wanted.fill:
        sequences = max(1, min(wanted.sequences, sequences))
        tokens = min(wanted.tokens_each or tokens, tokens)
        rows = min(rows, max(tokens, window) * sequences)
    return StepSizes(
        groups=tuple(group.name for group in groups),
        sequences=sequences,
        rows=rows,
        longest=tokens + max(group.ahead for group in groups),
        window=window,
        block_size=deployment.block_size,
        buckets=buckets or StepBuckets(),
        replicas=deployment.data_parallel_size > 1,
    )


def _refuse_share(args: EngineArgs, backend: str) -> None:
    if args.gpu_memory_utilization == FLAGS["gpu_memory_utilization"].default:
        return
    reason = (
        f"backend {backend!r} tells nothing of its device's memory, so none of it is shared out"
    )
    remedy = "--kv-cache-memory-bytes, or leave it out"
    raise Refused([Refusal("core", UTILIZATION, reason, remedy)])


def _kept_images(deployment: Deployment) -> int:
    width = 4 if deployment.dtype == "float32" else 2
    return KEPT_ROWS * deployment.model.hidden_size * width


def _encode_largest(runner: ModelRunner, vision: VisionSpec) -> None:
    side = -(-vision.image_size // vision.cell_size) * vision.cell_size
    runner.encode_images(
        patch_images(vision, [np.zeros((vision.channels, side, side), np.float32)])
    )
