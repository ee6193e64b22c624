"""A launch judged without weights and, where there is none, without a device: every reason against
it at once, whichever part it lies in.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ml4core import registry
from ml4core.api import Capabilities, Deployment, Device, ModelSpec, Refusal, Refused
from ml4core.engine import resolve as resolving
from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.collectives import ranks_of
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.image_limits import FLAG as IMAGES_FLAG
from ml4core.engine.image_limits import image_limit
from ml4core.engine.ranks.devices import refusals as device_refusals
from ml4core.engine.replicas.launch import refusals as replica_refusals
from ml4core.engine.speculative_config import refusals as draft_refusals
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.hub import is_local, resolve_model
from ml4core.models.requant import SOURCES, TARGET
from ml4core.models.shards import EXPERT_ROLES
from ml4core.planning import kv
from ml4core.planning.model import PlannedModel, checkpoint_model, published_model
from ml4core.planning.plan import Plan, PlanOptions, gib, make_plan
from ml4core.planning.proposals import propose

_PUBLISHED = re.compile(r"mistralai/Mistral-Large-4(-[A-Za-z0-9.]+)*")
_FORMS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "quark": "mxfp4", "bf16": "bf16"}
"""Words in a published name -> the form of its weights; without one it is FP8."""
_PLANNED_ONLY = frozenset(("--memory", "--weights"))
"""Flags of a plan that a launch has not."""


@dataclass(frozen=True)
class Launch:
    """What became of it.

    Attributes:
        choice: the backend and its devices; None if there are none.
        deployment: None where no device or no model is known to judge by.
        plan: None there, too, where the model can't be planned with these flags, and with a private
            cache layout whose bytes the opened session alone knows.
        options: what it was planned by.
        programs: sizes that steps are compiled for, by what they count, where the backend tells.
        refusals: every reason against it, sorted.
        what: what is refused.
    """

    choice: registry.Choice | None
    deployment: Deployment | None
    plan: Plan | None
    options: PlanOptions
    programs: Mapping[str, Sequence[int]] | None
    refusals: tuple[Refusal, ...]
    what: str

    def check(self) -> None:
        """Raises ``Refused`` with all reasons, if there is one."""
        if self.refusals:
            raise Refused(self.refusals, self.what)


def judge(args: EngineArgs, environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch of these flags. A published model that isn't here is judged by its published
    shape; without a device of the kind that is asked for, a named backend by the one that it names
    for this (``reference_device``).

    Raises ``ArgumentsError`` for flags that contradict each other or the environment.
    """
    args = switches.with_environment(args, environment)
    found, what, choice = list(args.refusals()), "this deployment", None
    kind = args.additional_config.get("device")
    try:
        choice = registry.select(args.backend, device_kind=str(kind) if kind else None)
    except Refused as refused:
        found += refused.refusals
        what = refused.what
    model, subject = _model(args), choice or _reference(args.backend)
    if model is None or subject is None:
        return Launch(choice, None, None, PlanOptions(), None, tuple(sorted(set(found))), what)
    plugin, device, capabilities = _parts(subject)
    options = _options(subject, model.spec)
    made = None
    try:
        if knows_layouts(args, options):
            made = make_plan(model, args, options)
    except ArgumentsError as error:  # a reason beside the others
        parts = (text.partition(": ") for text in error.problems)
        found += (Refusal("core", flag, text) for flag, _, text in parts)
    spec = model.spec if args.speculative_config else replace(model.spec, draft=None, taps=())
    if not image_limit(args.limit_mm_per_prompt):
        spec = replace(spec, vision=None)
    elif spec.vision is None:
        reason = f"{model.name} has no encoder of images"
        found.append(Refusal("core", IMAGES_FLAG, reason, "leave it out"))
    deployment = _deployment(args, spec, model, device, capabilities)
    experts = {lot.format for lot in model.table.lots if lot.role in EXPERT_ROLES}
    found += replica_refusals(args)
    if choice is not None:
        devices = [one.device for one in choice.devices]
        found += device_refusals(ranks_of(deployment), devices)
        found += () if made is None else _too_large(made, device)
    found += resolving.layout_refusals(deployment)
    found += resolving.limit_refusals(spec, capabilities)
    found += switches.refusals(args.additional_config, experts, capabilities)
    config = resolving.speculation(args, spec)
    if config is not None and spec.draft is not None:
        rows = deployment.max_num_batched_tokens
        found += draft_refusals(config, spec.draft, capabilities, rows)
    try:
        registry.check(deployment, capabilities, plugin.manager)
    except Refused as refused:
        found += refused.refusals
    programs = getattr(plugin.backend, "programs_for", lambda deployment: None)(deployment)
    return Launch(choice, deployment, made, options, programs, tuple(sorted(set(found))), what)


def named_backend(args: EngineArgs, model: ModelSpec) -> PlanOptions | None:
    """What a plan takes from the backend that is named: what it declares, and its private layouts,
    on a device that is here, else on the one that it names for this. None if there is neither, and
    for ``auto``.

    Raises ``Refused`` for a backend that is unknown or can't be loaded.
    """
    if args.backend == registry.AUTO:
        return None
    registry.load_plugin(registry.find(args.backend))
    kind = args.additional_config.get("device")
    subject: registry.Choice | Subject | None
    try:
        subject = registry.select(args.backend, device_kind=str(kind) if kind else None)
    except Refused:  # a plan needs no device
        subject = _reference(args.backend)
    return None if subject is None else _options(subject, model)


def knows_layouts(args: EngineArgs, options: PlanOptions) -> bool:
    """Whether the bytes of all cache layouts are known."""
    latent = resolving.kv_layout_id(args, options.words)
    index = resolving.index_layout_id(args, options.words, latent)
    own = (id for id in (latent, index) if id.startswith(resolving.PRIVATE))
    return all(id in options.layouts for id in own)


def _deployment(
    args: EngineArgs,
    spec: ModelSpec,
    model: PlannedModel,
    device: Device,
    capabilities: Capabilities,
) -> Deployment:
    converts = switches.REQUANT in args.additional_config
    formats = set()
    for lot in model.table.without("vision", *(() if spec.draft else ("drafter",))).lots:
        converted = converts and lot.role in EXPERT_ROLES and lot.format in SOURCES
        if lot.kind in ("matrix", "plain"):
            formats.add(TARGET if converted else lot.format)
    out = [part for part, own in (("drafter", spec.draft), ("vision", spec.vision)) if own is None]
    stored = model.table.without(*out).stored
    return resolving.resolve(args, spec, frozenset(formats), stored, device, capabilities)


def _model(args: EngineArgs) -> PlannedModel | None:
    """The model that is here, or the published one of that name; None for one that would have to
    be downloaded first.
    """
    if is_local(args.model):
        path = resolve_model(args.model, args.revision, args.download_dir)
        return checkpoint_model(Checkpoint.open(Path(path), require_tensors=False))
    if not _PUBLISHED.fullmatch(args.model):
        return None
    words = args.model.lower().split("-")
    return published_model(next((_FORMS[word] for word in words if word in _FORMS), "fp8"))


Subject = tuple[registry.LoadedPlugin, Device]


def _reference(name: str) -> Subject | None:
    """A named backend with the device that it names; None for ``auto``, for one that can't be
    loaded, and for one that names none.
    """
    if name == registry.AUTO:
        return None
    try:
        plugin = registry.load_plugin(registry.find(name))
    except Refused:  # why has been told already
        return None
    device: Any = getattr(plugin.backend, "reference_device", None)
    return (plugin, device) if isinstance(device, Device) else None


def _options(subject: registry.Choice | Subject, model: ModelSpec) -> PlanOptions:
    plugin, device, capabilities = _parts(subject)
    layouts_for = getattr(plugin.backend, "layouts_for", lambda spec: kv.NONE)
    # The host's memory is not the process's to share out. A real device of another architecture has
    # its own, even where torch sees its tensors as the host's.
    hosts = device.torch_device == "cpu" and (
        device.kind != "real" or device.arch == platform.machine()
    )
    memory = 0 if hosts else device.memory_bytes
    return PlanOptions(memory or None, backend=capabilities, layouts=layouts_for(model))


def _too_large(plan: Plan, device: Device) -> tuple[Refusal, ...]:
    """Weights that can't be loaded. What steps and caches take is judged where it is measured, as
    the engine starts.
    """
    if plan.usable is None or plan.weight_bytes <= plan.usable:
        return ()
    weights, room = gib(plan.weight_bytes), gib(plan.usable)
    reason = f"weights take {weights}, and {device.name} has {room} to use"
    works = ", or ".join(str(one) for one in propose(plan) if one.flag not in _PLANNED_ONLY)
    return (Refusal("core", "memory", reason, works or "more devices, or larger ones"),)


def _parts(
    subject: registry.Choice | Subject,
) -> tuple[registry.LoadedPlugin, Device, Capabilities]:
    if isinstance(subject, registry.Choice):
        return subject.plugin, subject.device, subject.capabilities
    plugin, device = subject
    return plugin, device, plugin.backend.capabilities(device)
