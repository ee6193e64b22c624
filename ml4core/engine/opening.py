"""The engine core of a loaded model, as its flags want it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ml4core.api import Capabilities, Deployment
from ml4core.engine import resolve as resolving
from ml4core.engine.args import EngineArgs
from ml4core.engine.block_hash import ROOT
from ml4core.engine.core import EngineCore
from ml4core.engine.deadline import TimedSteps
from ml4core.engine.drafting import ModelProposer
from ml4core.engine.grammars import GrammarCompiler
from ml4core.engine.image_limits import image_limit
from ml4core.engine.images import ImageEncoder
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.kv_pool import Pools
from ml4core.engine.layout import EXACT
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampler import Sampler
from ml4core.engine.scheduler import SchedulerConfig
from ml4core.engine.speculation import Speculation
from ml4core.engine.steps import ModelSteps, StepRunner

if TYPE_CHECKING:
    from ml4core.engine.replicas.lock_step import LockStep


def open_steps(args: EngineArgs, deployment: Deployment, runner: ModelRunner) -> StepRunner:
    """Steps of a runner's model, with their drafts, within the time that the flags give."""
    drafts = resolving.speculation(args, deployment.model)
    vocab_size, draft = deployment.model.vocab_size, deployment.model.draft
    speculation = None
    if drafts is not None and draft is not None:
        proposer = ModelProposer(runner, draft.depth)
        # Where steps are tried as the engine starts, nothing is to grow later.
        slots = 1 if runner.memory is None else deployment.max_num_seqs
        speculation = Speculation(proposer, runner.judge, drafts, vocab_size, slots)
    vision = deployment.model.vision
    images = None if vision is None else ImageEncoder(runner, vision)
    sampler = Sampler(runner.ops, vocab_size, runner.backend)
    steps = ModelSteps(runner, sampler, speculation, images)
    if not args.step_timeout_s:
        return steps
    return TimedSteps(steps, args.step_timeout_s, deployment.device.torch_device)


def open_core(
    args: EngineArgs,
    deployment: Deployment,
    capabilities: Capabilities,
    runner: ModelRunner,
    plan: Pools,
    steps: StepRunner,
    eos_ids: frozenset[int],
    cache_root: bytes = ROOT,
    grammars: GrammarCompiler | None = None,
    lock_step: LockStep | None = None,
) -> EngineCore:
    """The engine core over a runner whose weights and caches are there; ``lock_step``: with the
    other replicas, if there are any.
    """
    overlap = args.async_scheduling
    if overlap is None:
        overlap = "feature:async_scheduling" in capabilities
    drafts = resolving.speculation(args, deployment.model)
    config = SchedulerConfig(
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        policy="priority" if args.scheduling_policy == "priority" else "fcfs",
        drafts=0 if drafts is None else drafts.num_speculative_tokens,
    )
    kv = KVManager(
        [group.paged(plan.block_size) for group in plan.groups],
        runner.pools,
        plan.block_size,
        step_rows=config.max_num_batched_tokens * (2 if overlap else 1),
        caching=args.enable_prefix_caching,
        root=cache_root,
    )
    buckets = getattr(runner.session, "step_buckets", None) or EXACT
    together = None
    if lock_step is not None:
        from ml4core.engine.replicas.together import Together  # what no replica alone needs

        together = Together(lock_step, buckets, deployment.device.torch_device, steps)
    return EngineCore(
        steps,
        kv,
        config,
        vocab_size=deployment.model.vocab_size,
        max_model_len=deployment.max_model_len,
        eos_ids=eos_ids,
        seed=deployment.seed,
        device=deployment.device.torch_device,
        overlap=overlap,
        buckets=buckets,
        grammars=grammars,
        mend_drafts=drafts is not None and not drafts.drawn,
        max_images=image_limit(args.limit_mm_per_prompt),
        vision=deployment.model.vision,
        together=together,
    )
