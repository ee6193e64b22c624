"""Opens an engine: checkpoint, backend, weights and caches, with every reason against it in one
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from ml4core import registry
from ml4core.api import Deployment, Fault, FaultError
from ml4core.engine import resolve as resolving
from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.bring_up import bring_up
from ml4core.engine.cache_identity import cache_root
from ml4core.engine.cache_sizes import Wanted
from ml4core.engine.collectives import ranks_of
from ml4core.engine.core import EngineCore
from ml4core.engine.estimates import estimates
from ml4core.engine.generate import Completion, OnToken, generate
from ml4core.engine.grammars import GrammarCompiler
from ml4core.engine.kv_pool import Pools
from ml4core.engine.model_files import ModelFiles
from ml4core.engine.opening import open_core, open_steps
from ml4core.engine.parts import Parts
from ml4core.engine.ranks.devices import refusals as device_refusals
from ml4core.engine.replicas.launch import refusals as replica_refusals
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.speculative_config import SpeculativeConfig
from ml4core.engine.speculative_config import refusals as draft_refusals
from ml4core.engine.start_report import start_report
from ml4core.engine.start_up import StartUp
from ml4core.engine.trials import Told
from ml4core.models.requant import expert_formats

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""


class Engine:
    """A loaded model that generates. Made by ``open_engine``."""

    def __init__(
        self,
        choice: registry.Choice,
        deployment: Deployment,
        runner: ModelRunner,
        plan: Pools,
        core: EngineCore,
        speculation: SpeculativeConfig | None = None,
        parts: Parts | None = None,
        start: StartUp | None = None,
        estimates: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            parts: what is to be closed; None: nothing.
            start: how it was brought up, on a device that tells of its memory.
            estimates: what the planner said of that.
        """
        self.deployment = deployment
        self.runner = runner
        self.kv_plan = plan
        self.core = core
        self.speculation = speculation
        self._choice = choice
        self._parts = parts or Parts()
        self._start = start
        self._estimates = estimates
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

    @property
    def alarms(self) -> tuple[int, ...]:
        """Descriptors of which one can be read from once another rank has failed, or while another
        replica wants to step or to stop; none without others.
        """
        return self._parts.alarms

    def watch(self, callback: Callable[[], None]) -> None:
        """Has it called, in another thread, when another replica gives the core work."""
        if self._parts.lock_step is not None:
            self._parts.lock_step.watch(callback)

    def look(self) -> Fault | None:
        """Stops the core if another rank has failed, also while nothing runs; its fault."""
        ranks = self._parts.ranks
        if ranks is not None and self.core.fault is None:
            fault = ranks.fault(self.core.stats().steps)
            if fault is not None:
                self.core.stop(fault)
        return self.core.fault

    def report(self) -> dict[str, Any]:
        """The start-up report as JSON-able data: what runs where, who serves each part, and why not
        others.
        """
        found = start_report(
            self._choice, self.deployment, self.runner, self.kv_plan, self.speculation
        )
        ranks, deployment = self._parts.ranks, self.deployment
        if deployment.tensor_parallel_size * deployment.data_parallel_size > 1:
            sums = getattr(self.runner.session, "switches", {}).get("all-reduce")
            found["parallel"] = {
                "tensor_parallel_size": deployment.tensor_parallel_size,
                "data_parallel_size": deployment.data_parallel_size,
                "data_parallel_rank": deployment.data_parallel_rank,
                "enable_expert_parallel": deployment.enable_expert_parallel,
                "spanning_session": deployment.spanning_session,
                **({} if ranks is None else ranks.report(sums)),
            }
        if self._start is not None:
            share = self.deployment.gpu_memory_utilization
            found["memory"] = self._start.report(share, self._estimates)
            found["start_up"] = asdict(self._start.timings)
        return found

    def close(self) -> None:
        """Closes the session, but for one within which a step never ended: its thread may use it
        for as long as the process lives. Ends the other ranks.
        """
        self._parts.close()


def open_engine(
    args: EngineArgs,
    *,
    choice: registry.Choice | None = None,
    sequences: int = 1,
    tokens_each: int | None = None,
    eos_ids: frozenset[int] = frozenset(),
    progress: Progress | None = None,
    grammars: GrammarCompiler | None = None,
    fill: bool = False,
    starting: Told | None = None,
    serves: bool = False,
) -> Engine:
    """Opens ``args.model`` on ``args.backend``.

    Args:
        choice: what ``choose_backend`` gave for these ``args``, if it was asked already.
        sequences: how many sequences will be wanted at once, at most ``max_num_seqs`` of them.
        tokens_each: longest sequence that will be wanted; None for the whole context.
        eos_ids: tokens that end an answer; the tokenizer knows them.
        progress: told of weight bytes loaded.
        grammars: compiles the forms of answers; None refuses requests for one.
        fill: requests are not known yet: on a device that tells of its memory caches get all that
            is left of ``--gpu-memory-utilization``, whatever ``sequences`` and ``tokens_each`` are.
        starting: told how far warming up and capturing is there.
        serves: whoever runs the engine steps as soon as the core has work, also where another
            replica gives it. Without, several replicas are refused.

    Raises:
        Refused: with all reasons, before anything is allocated.
        CheckpointError: the checkpoint can't be used.
        RequestError: a flag's value can't be.
        MemoryError: the device has too little memory; names for what.
        ReplicaLostError: another replica can't be opened.
    """
    args = switches.with_environment(args)
    choice = choice or choose_backend(args, serves=serves)
    files = ModelFiles.open(args)
    deployment = files.deployment(args, choice.device, choice.capabilities)
    devices = [found.device for found in choice.devices]
    refusals = [
        *args.refusals(),
        *replica_refusals(args, serves),
        *device_refusals(ranks_of(deployment), devices),
        *resolving.layout_refusals(deployment),
        *resolving.limit_refusals(files.spec, choice.capabilities),
        *switches.refusals(
            args.additional_config, expert_formats(files.tensors), choice.capabilities
        ),
    ]
    config = resolving.speculation(args, files.spec)
    if config is not None and files.spec.draft is not None:
        rows = deployment.max_num_batched_tokens
        refusals += draft_refusals(config, files.spec.draft, choice.capabilities, rows)
    registry.check(deployment, choice.capabilities, choice.manager, refusals)
    files.check_cut(deployment)
    parts = Parts.start(args, choice, files, deployment)
    try:
        with parts.together():
            runner = parts.open(choice, deployment)
            steps = parts.steps = open_steps(args, deployment, runner)
            wanted = Wanted(sequences, tokens_each, fill)
            plan, start = bring_up(
                args,
                deployment,
                runner,
                steps,
                wanted,
                lambda: parts.load(files, runner, deployment, progress),
                starting,
                parts.settle,
            )
            tensors = files.checkpoint.path.glob("*.safetensors")
            root = cache_root(deployment, plan.layouts, tensors)
            core = open_core(
                args,
                deployment,
                choice.capabilities,
                runner,
                plan,
                steps,
                eos_ids,
                root,
                grammars,
                parts.lock_step,
            )
            planner = (
                {}
                if start is None
                else estimates(files.checkpoint, args, deployment, choice.capabilities)
            )
            parts.ready()
    except BaseException:
        parts.close()
        raise
    return Engine(choice, deployment, runner, plan, core, config, parts, start, planner)
