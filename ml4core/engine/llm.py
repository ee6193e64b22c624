"""Opens an engine: checkpoint, backend, weights and caches, with every reason against it in one
error.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from typing import Any

import torch

from ml4core import registry
from ml4core.api import (
    DRAFT_GROUP,
    Deployment,
    FaultError,
    ModelSpec,
    Segment,
    StepShape,
)
from ml4core.engine import resolve as resolving
from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.cache_identity import cache_root
from ml4core.engine.cache_sizes import plan_caches
from ml4core.engine.core import EngineCore
from ml4core.engine.deadline import TimedSteps
from ml4core.engine.generate import Completion, OnToken, generate
from ml4core.engine.grammars import GrammarCompiler
from ml4core.engine.image_limits import FLAG as IMAGES_FLAG
from ml4core.engine.image_limits import image_limit
from ml4core.engine.kv_pool import Pools
from ml4core.engine.opening import open_core, open_steps
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.speculative_config import FLAG, KEYS, SpeculativeConfig
from ml4core.engine.speculative_config import refusals as draft_refusals
from ml4core.engine.steps import StepRunner
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
    ) -> None:
        """``steps``: what the core runs, if there is something of it to be closed."""
        self.deployment = deployment
        self.runner = runner
        self.kv_plan = plan
        self.core = core
        self.speculation = speculation
        self._choice = choice
        self._steps = steps
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
        pages, none = tuple((g, width) for g in plan.layouts), Segment(0, 0, 0)
        shapes = {
            "decode": StepShape(Segment(1, 1, 1), none, none, pages, 1),
            "prefill": StepShape(none, none, Segment(1, 512, 512), pages, 1),
        }
        if (drafts := self.speculation) is not None:
            window = Segment(1, drafts.window, drafts.window)
            del shapes["decode"]
            shapes["verify"] = StepShape(none, window, none, pages, drafts.window)
        for name, shape in shapes.items():
            parts += [asdict(c) for c in self.runner.choices(shape) if c.step_kind in (name, "*")]
        if drafts is not None and (draft := deployment.model.draft) is not None:
            block = Segment(1, draft.depth, draft.depth)
            table = ((DRAFT_GROUP, width),)
            drafting = StepShape(none, block, Segment(1, *2 * (drafts.window,)), table, draft.depth)
            stages = (("verify_and_sample", shapes["verify"]), ("draft_block", drafting))
            parts += [asdict(self.runner.stage(*stage)[1]) for stage in stages]
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
            "switches": switches.told(deployment.additional_config, self.runner.session),
            "kv": {
                "layouts": {group: layout.id for group, layout in plan.layouts.items()},
                "owners": {group: len(layers) for group, layers in plan.owners.items()},
                "row_bytes": {group: one.bytes_per_token for group, one in plan.layouts.items()},
                "bytes_per_token": plan.bytes_per_token,
                "block_size": plan.block_size,
                "tokens": plan.tokens,
                "bytes": plan.nbytes,
            },
            "max_model_len": deployment.max_model_len,
            "speculation": self._told_drafts(),
            "assumptions": dict(deployment.model.assumptions),
            "parts": unique,
        }

    def _told_drafts(self) -> dict[str, Any] | None:
        drafts, draft = self.speculation, self.deployment.model.draft
        if drafts is None or draft is None:
            return None
        facts = {key: getattr(drafts, key) for key in KEYS}
        return facts | {
            "drafter": {
                "layers": len(draft.layers),
                "depth": draft.depth,
                "taps": list(draft.taps),
                "window": draft.window,
                "assumptions": dict(draft.assumptions),
            }
        }

    def close(self) -> None:
        """Closes the session; but for one within which a step never ended: its thread may use it
        for as long as the process lives.
        """
        if not isinstance(self._steps, TimedSteps) or self._steps.close():
            self.runner.session.close()


def open_engine(
    args: EngineArgs,
    *,
    choice: registry.Choice | None = None,
    sequences: int = 1,
    tokens_each: int | None = None,
    eos_ids: frozenset[int] = frozenset(),
    progress: Progress | None = None,
    grammars: GrammarCompiler | None = None,
) -> Engine:
    """Opens ``args.model`` on ``args.backend``.

    Args:
        choice: what ``choose_backend`` gave for these ``args``, if it was asked already.
        sequences: how many sequences will be wanted at once, at most ``max_num_seqs`` of them.
        tokens_each: longest sequence that will be wanted; None for the whole context.
        eos_ids: tokens that end an answer; the tokenizer knows them.
        progress: told of weight bytes loaded.
        grammars: compiles the forms of answers; None refuses requests for one.

    Raises:
        Refused: with all reasons, before anything is allocated.
        CheckpointError: the checkpoint can't be used.
        RequestError: a flag's value can't be.
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
    try:
        runner = ModelRunner(session, choice.backend.name, deployment, choice.capabilities)
        plan = plan_caches(args, deployment, session.layouts, sequences, tokens_each)
        dtype = getattr(torch, deployment.dtype)
        layers = load_layers(
            checkpoint, spec, dtype, progress=progress, report=tensors, requant=requant
        )
        runner.load(layers)
        if drafter is not None and spec.draft is not None:
            runner.load_draft(load_draft(checkpoint, spec.draft, dtype, report=drafter))
        if vision is not None and spec.vision is not None:
            runner.load_vision(load_vision(checkpoint, spec.vision, dtype, report=vision))
        runner.allocate_kv(plan)
        root = cache_root(deployment, plan.layouts, checkpoint.path.glob("*.safetensors"))
        steps = open_steps(args, deployment, runner)
        core = open_core(
            args, deployment, choice.capabilities, runner, plan, steps, eos_ids, root, grammars
        )
    except BaseException:
        session.close()
        raise
    return Engine(choice, deployment, runner, plan, core, config, steps)


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
