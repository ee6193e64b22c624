"""Opens an engine: checkpoint, backend, weights and caches, with every reason against it in one
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import torch

from ml4core import registry
from ml4core.api import (
    Deployment,
    FaultError,
    ModelSpec,
    Session,
)
from ml4core.engine import resolve as resolving
from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.bring_up import bring_up
from ml4core.engine.cache_identity import cache_root
from ml4core.engine.cache_sizes import Wanted
from ml4core.engine.core import EngineCore
from ml4core.engine.deadline import TimedSteps
from ml4core.engine.estimates import estimates
from ml4core.engine.generate import Completion, OnToken, generate
from ml4core.engine.grammars import GrammarCompiler
from ml4core.engine.image_limits import FLAG as IMAGES_FLAG
from ml4core.engine.image_limits import image_limit
from ml4core.engine.kv_pool import Pools
from ml4core.engine.opening import open_core, open_steps
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.speculative_config import FLAG, SpeculativeConfig
from ml4core.engine.speculative_config import refusals as draft_refusals
from ml4core.engine.start_report import start_report
from ml4core.engine.start_up import StartUp
from ml4core.engine.steps import StepRunner
from ml4core.engine.trials import Told
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import with_drafter
from ml4core.models.dspark_weights import load_draft, validate_draft
from ml4core.models.errors import CheckpointError
from ml4core.models.hub import resolve_model
from ml4core.models.pixtral import vision_spec
from ml4core.models.pixtral_weights import load_vision, validate_vision
from ml4core.models.requant import expert_formats, formats_after, nbytes_after
from ml4core.models.tensors import TensorReport, load_model_spec, validate
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
        plan: Pools,
        core: EngineCore,
        speculation: SpeculativeConfig | None = None,
        steps: StepRunner | None = None,
        start: StartUp | None = None,
        estimates: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            steps: what the core runs, if there is something of it to be closed.
            start: how it was brought up, on a device that tells of its memory.
            estimates: what the planner said of that.
        """
        self.deployment = deployment
        self.runner = runner
        self.kv_plan = plan
        self.core = core
        self.speculation = speculation
        self._choice = choice
        self._steps = steps
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

    def report(self) -> dict[str, Any]:
        """The start-up report as JSON-able data: what runs where, who serves each part, and why not
        others.
        """
        found = start_report(
            self._choice, self.deployment, self.runner, self.kv_plan, self.speculation
        )
        if self._start is not None:
            share = self.deployment.gpu_memory_utilization
            found["memory"] = self._start.report(share, self._estimates)
            found["start_up"] = asdict(self._start.timings)
        return found

    def close(self) -> None:
        """Closes the session; but for one within which a step never ended: its thread may use it
        for as long as the process lives.
        """
        _close(self.runner.session, self._steps)


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

    Raises:
        Refused: with all reasons, before anything is allocated.
        CheckpointError: the checkpoint can't be used.
        RequestError: a flag's value can't be.
        MemoryError: the device has too little memory; names for what.
    """
    args = switches.with_environment(args)
    choice = choice or choose_backend(args)
    checkpoint = Checkpoint.open(resolve_model(args.model, args.revision, args.download_dir))
    spec = load_model_spec(checkpoint)
    tensors = validate(checkpoint, spec)
    drafter = None
    if args.speculative_config:
        spec, drafter = _with_drafter(checkpoint, spec)
    vision = None
    if image_limit(args.limit_mm_per_prompt):
        spec, vision = _with_vision(checkpoint, spec)
    beside = [report.nbytes for report in (drafter, vision) if report is not None]
    requant = switches.requant(args.additional_config, choice.device.torch_device)
    formats, nbytes = tensors.formats, tensors.nbytes
    if requant is not None:
        formats, nbytes = formats_after(tensors), nbytes_after(tensors)
    deployment = resolving.resolve(
        args,
        spec,
        formats | (frozenset() if drafter is None else drafter.formats),
        nbytes + sum(beside),
        choice.device,
        choice.capabilities,
    )
    refusals = [
        *args.refusals(),
        *resolving.layout_refusals(deployment),
        *resolving.limit_refusals(spec, choice.capabilities),
        *switches.refusals(args.additional_config, expert_formats(tensors), choice.capabilities),
    ]
    config = resolving.speculation(args, spec)
    if config is not None and spec.draft is not None:
        rows = deployment.max_num_batched_tokens
        refusals += draft_refusals(config, spec.draft, choice.capabilities, rows)
    registry.check(deployment, choice.capabilities, choice.manager, refusals)
    session = registry.open_session(choice.plugin, deployment)
    steps: StepRunner | None = None
    try:
        runner = ModelRunner(session, choice.backend.name, deployment, choice.capabilities)
        steps = open_steps(args, deployment, runner)
        dtype = getattr(torch, deployment.dtype)

        def load() -> None:
            runner.load(
                load_layers(
                    checkpoint, spec, dtype, progress=progress, report=tensors, requant=requant
                )
            )
            if drafter is not None and spec.draft is not None:
                runner.load_draft(load_draft(checkpoint, spec.draft, dtype, report=drafter))
            if vision is not None and spec.vision is not None:
                runner.load_vision(load_vision(checkpoint, spec.vision, dtype, report=vision))

        wanted = Wanted(sequences, tokens_each, fill)
        plan, start = bring_up(args, deployment, runner, steps, wanted, load, starting)
        root = cache_root(deployment, plan.layouts, checkpoint.path.glob("*.safetensors"))
        core = open_core(
            args, deployment, choice.capabilities, runner, plan, steps, eos_ids, root, grammars
        )
        planner = {} if start is None else estimates(checkpoint, args, deployment)
    except BaseException:
        _close(session, steps)
        raise
    return Engine(choice, deployment, runner, plan, core, config, steps, start, planner)


def _close(session: Session, steps: StepRunner | None) -> None:
    if not isinstance(steps, TimedSteps) or steps.close():
        session.close()


def _with_drafter(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[ModelSpec, TensorReport]:
    """The model with its drafter, and the drafter's tensors. Raises ``CheckpointError``."""
    try:
        spec = with_drafter(checkpoint, spec)
        assert spec.draft is not None
        return spec, validate_draft(checkpoint, spec.draft)
    except CheckpointError as error:
        raise CheckpointError(f"{FLAG}: {error}") from error


def _with_vision(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[ModelSpec, TensorReport]:
    """The model with its encoder of images, and the encoder's tensors. Raises
    ``CheckpointError``.
    """
    vision = vision_spec(spec.extras, spec.hidden_size)
    if vision is None:
        raise CheckpointError(f"{IMAGES_FLAG}: {checkpoint.path} has no encoder of images")
    return replace(spec, vision=vision), validate_vision(checkpoint, vision)
