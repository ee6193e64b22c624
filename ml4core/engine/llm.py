"""Opens an engine: checkpoint, backend, weights and caches, with every reason against it in one
error.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

import torch

from ml4core import registry
from ml4core.api import Capabilities, Deployment, FaultError, Segment, StepShape
from ml4core.engine import resolve as resolving
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.cache_sizes import plan_caches
from ml4core.engine.core import EngineCore
from ml4core.engine.generate import Completion, OnToken, generate
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.kv_pool import KVPlan
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampler import Sampler
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import SchedulerConfig
from ml4core.engine.steps import ModelSteps
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.hub import resolve_model
from ml4core.models.tensors import load_model_spec, validate
from ml4core.models.weights import load_layers

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""


class Engine:
    """A loaded model that generates. Made by ``open_engine``."""

    def __init__(
        self,
        choice: registry.Choice,
        deployment: Deployment,
        runner: ModelRunner,
        plan: KVPlan,
        core: EngineCore,
    ) -> None:
        self.deployment = deployment
        self.runner = runner
        self.kv_plan = plan
        self.core = core
        self._choice = choice
        self._fault_told = False

    def generate(
        self, prompts: Seq[Seq[int]], params: SamplingParams, on_token: OnToken | None = None
    ) -> list[Completion]:
        """``params.n`` completions a prompt, in order. Raises ``RequestError`` for bad input,
        ``FaultError`` once the engine has stopped.
        """
        try:
            return generate(self.core, prompts, params, self.deployment.seed, on_token)
        except FaultError:
            self.tell_fault()
            raise

    def tell_fault(self) -> None:
        """Tells plugins, once, why the core has stopped. Does nothing while it serves."""
        if self.core.fault is not None and not self._fault_told:
            self._fault_told = True
            registry.notify_fault(self.core.fault, self._choice.manager)

    def report(self) -> dict[str, Any]:
        """The start-up report as JSON-able data: what runs where, who serves each part, and why not
        others.
        """
        choice, deployment, plan = self._choice, self.deployment, self.kv_plan
        width = -(-deployment.max_model_len // deployment.block_size)
        parts = []
        for segment, name in ((Segment(1, 1, 1), "decode"), (Segment(1, 512, 512), "prefill")):
            none = Segment(0, 0, 0)
            ends = (segment, none, none) if name == "decode" else (none, none, segment)
            shape = StepShape(*ends, tuple((g, width) for g in plan.layouts), 1)
            parts += [asdict(c) for c in self.runner.choices(shape) if c.step_kind in (name, "*")]
        ops_seen: set[str] = set()
        unique = []
        for part in parts:
            if part["step_kind"] == "*":
                if part["part"] in ops_seen:
                    continue
                ops_seen.add(part["part"])
            unique.append(part)
        record = choice.plugin.record
        return {
            "backend": {
                "name": record.name,
                "distribution": record.distribution,
                "version": record.version,
            },
            "device": asdict(deployment.device),
            "passed_over": [
                {"name": name, "reasons": [str(r) for r in refusals]}
                for name, refusals in choice.trace
            ],
            "model": deployment.model.name,
            "dtype": deployment.dtype,
            "weights": {
                "formats": sorted(deployment.weight_formats),
                "bytes": deployment.weight_bytes,
            },
            "kv": {
                "layouts": {group: layout.id for group, layout in plan.layouts.items()},
                "owners": {group: len(layers) for group, layers in plan.owners.items()},
                "bytes_per_token": plan.bytes_per_token,
                "block_size": plan.block_size,
                "tokens": plan.tokens,
                "bytes": plan.nbytes,
            },
            "max_model_len": deployment.max_model_len,
            "assumptions": dict(deployment.model.assumptions),
            "parts": unique,
        }

    def close(self) -> None:
        self.runner.session.close()


def open_engine(
    args: EngineArgs,
    *,
    choice: registry.Choice | None = None,
    sequences: int = 1,
    tokens_each: int | None = None,
    eos_ids: frozenset[int] = frozenset(),
    progress: Progress | None = None,
) -> Engine:
    """Opens ``args.model`` on ``args.backend``.

    Args:
        choice: what ``choose_backend`` gave for these ``args``, if it was asked already.
        sequences: how many sequences will be wanted at once, at most ``max_num_seqs`` of them.
        tokens_each: longest sequence that will be wanted; None for the whole context.
        eos_ids: tokens that end an answer; the tokenizer knows them.
        progress: told of weight bytes loaded.

    Raises:
        Refused: with all reasons, before anything is allocated.
        CheckpointError: the checkpoint can't be used.
        RequestError: a flag's value can't be.
    """
    choice = choice or choose_backend(args)
    checkpoint = Checkpoint.open(resolve_model(args.model, args.revision, args.download_dir))
    spec = load_model_spec(checkpoint)
    tensors = validate(checkpoint, spec)
    deployment = resolving.resolve(
        args, spec, tensors.formats, tensors.nbytes, choice.device, choice.capabilities
    )
    refusals = [
        *args.refusals(),
        *resolving.layout_refusals(deployment),
        *resolving.limit_refusals(spec, choice.capabilities),
    ]
    registry.check(deployment, choice.capabilities, choice.manager, refusals)
    session = registry.open_session(choice.plugin, deployment)
    try:
        runner = ModelRunner(session, choice.backend.name, deployment, choice.capabilities)
        plan = plan_caches(args, deployment, session.layouts, sequences, tokens_each)
        dtype = getattr(torch, deployment.dtype)
        runner.load(load_layers(checkpoint, spec, dtype, progress=progress, report=tensors))
        runner.allocate_kv(plan)
        core = open_core(args, deployment, choice.capabilities, runner, plan, eos_ids)
    except BaseException:
        session.close()
        raise
    return Engine(choice, deployment, runner, plan, core)


def open_core(
    args: EngineArgs,
    deployment: Deployment,
    capabilities: Capabilities,
    runner: ModelRunner,
    plan: KVPlan,
    eos_ids: frozenset[int],
) -> EngineCore:
    """The engine core over a runner whose weights and caches are there."""
    overlap = args.async_scheduling
    if overlap is None:
        overlap = "feature:async_scheduling" in capabilities
    config = SchedulerConfig(
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        policy="priority" if args.scheduling_policy == "priority" else "fcfs",
    )
    kv = KVManager(
        [KVGroup(name) for name in plan.layouts],
        runner.pools,
        plan.block_size,
        step_rows=config.max_num_batched_tokens * (2 if overlap else 1),
        caching=args.enable_prefix_caching,
    )
    vocab_size = deployment.model.vocab_size
    return EngineCore(
        ModelSteps(runner, Sampler(runner.ops, vocab_size)),
        kv,
        config,
        vocab_size=vocab_size,
        max_model_len=deployment.max_model_len,
        eos_ids=eos_ids,
        seed=deployment.seed,
        device=deployment.device.torch_device,
        overlap=overlap,
    )
