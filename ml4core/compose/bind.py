"""Binding: for each layer and step shape the largest stage that a provider accepts, and the record
of each choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ml4core.api import (
    OPS,
    STAGES,
    Accepted,
    Candidate,
    Capabilities,
    Collectives,
    LayerSpec,
    ModelSpec,
    Refusal,
    Refused,
    Rejected,
    Session,
    StepShape,
    VisionShape,
)
from ml4core.compose import attention, draft, ffn, layer, unabsorbed, verify, vision
from ml4core.compose.context import StageContext
from ml4core.compose.contract import CheckedOp, FirstStep
from ml4core.compose.ops import COMPOSED

COMPOSE = "compose"
"""The provider name of core's own compositions."""

_BUILDERS: Mapping[str, Callable[..., Callable[..., Any]]] = MappingProxyType(
    {
        "decoder_layer": layer.decoder_layer,
        "attention": attention.attention,
        "attn_inputs": attention.attn_inputs,
        "select": attention.select,
        "sparse_mla": attention.sparse_mla,
        "attn_output": attention.attn_output,
        "ffn": ffn.ffn,
        "verify_and_sample": verify.verify_and_sample,
        "draft_block": draft.draft_block,
        "vision_encoder": vision.vision_encoder,
    }
)


@dataclass(frozen=True)
class Choice:
    """One line of the start-up report.

    Attributes:
        part: a stage's or op's name.
        layer_kind: the layer kind it was bound for, ``*`` for ops and stages of the whole model.
        step_kind: ``decode``, ``verify``, ``prefill``, ``mixed`` or ``*``.
        provider: who serves it; ``parts`` if it was composed of its children.
        chosen_by: ``backend`` (a provider of the backend), ``core`` (composition) or ``flag``.
        layers: the layers of that kind.
        rejected: the candidates that were passed over, with their reasons.
    """

    part: str
    layer_kind: str
    step_kind: str
    provider: str
    chosen_by: str
    version: str = ""
    layers: tuple[int, ...] = ()
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True)
class BoundModel:
    """A callable a layer, in layer order, each with the signature of ``decoder_layer``; the ops
    and collectives outside of layers; and the dtype of activations and the residual.
    """

    model: ModelSpec
    layers: tuple[Callable[..., Any], ...]
    ops: Mapping[str, Callable[..., Any]]
    choices: tuple[Choice, ...]
    dtype: torch.dtype
    collectives: Collectives


def bind_ops(
    session: Session, capabilities: Capabilities, backend: str
) -> tuple[Mapping[str, Callable[..., Any]], tuple[Choice, ...]]:
    """The op table of a session: its own ops, then core's compositions if ``feature:compose`` is
    declared. Own ones are held against the contract, see ``CheckedOp``.

    Raises ``Refused`` for each op that nobody gives, and for each own op that the contract table
    doesn't know or that the capabilities don't declare.
    """
    own = session.ops
    problems = []
    for name in own:
        if name not in OPS:
            reason, remedy = "is not in the op table", "a name of ml4core.api.OPS"
            problems.append(Refusal(backend, f"op:{name}", reason, remedy))
        elif f"op:{name}" not in capabilities:
            reason = "is offered but not declared"
            problems.append(Refusal(backend, f"op:{name}", reason, "declare it as a capability"))
    compose = "feature:compose" in capabilities
    bound: dict[str, Callable[..., Any]] = {}
    choices: list[Choice] = []
    for name in OPS:
        if name in own:
            theirs = own[name] is not COMPOSED[name]
            bound[name] = CheckedOp(OPS[name], own[name], backend) if theirs else own[name]
            choices.append(Choice(name, "*", "*", backend, "backend"))
        elif compose:
            bound[name] = COMPOSED[name]
            choices.append(Choice(name, "*", "*", COMPOSE, "core"))
        else:
            reason = "neither offered by the backend nor composed by core"
            problems.append(
                Refusal(backend, f"op:{name}", reason, "offer it, or declare feature:compose")
            )
    if problems:
        raise Refused(problems, f"backend {backend!r}")
    return MappingProxyType(bound), tuple(choices)


def bind_model(session: Session, context: StageContext, shape: StepShape) -> BoundModel:
    """Binds each layer of ``context.model`` for a step shape. ``context.layer`` is ignored.

    Ops of the backend are checked in the first step, see ``FirstStep``.
    """
    first = FirstStep(context.ops)
    context = replace(context, ops=first.ops)
    found: dict[Choice, tuple[int, ...]] = {}  # a choice without its layers -> these
    layers: list[Callable[..., Any]] = []
    for spec in context.model.layers:
        call, choices = _bind_stage("decoder_layer", session, replace(context, layer=spec), shape)
        layers.append(call)
        for choice in choices:
            found[choice] = (*found.get(choice, ()), spec.index)
    layers[:1] = map(first.begins, layers[:1])
    merged = tuple(replace(choice, layers=indices) for choice, indices in found.items())
    return BoundModel(
        context.model, tuple(layers), context.ops, merged, context.dtype, context.collectives
    )


def bind_global_stage(
    name: str, session: Session, context: StageContext, shape: StepShape | VisionShape
) -> tuple[Callable[..., Any], Choice]:
    """Binds a stage of the whole model: the session's first accepted candidate, else composition.

    ``context.layer`` is ignored. Raises ``ValueError`` for a name that is no such stage, and
    ``Refused`` with each candidate's reasons if nobody serves it.
    """
    if name not in STAGES or STAGES[name].per_layer:
        known = ", ".join(stage for stage, spec in STAGES.items() if not spec.per_layer)
        raise ValueError(f"{name!r} is no stage of the whole model; these are {known}")
    step_kind = shape.kind if isinstance(shape, StepShape) else "*"
    accepted, rejected = _first_accepted(session.providers(name, None, shape))
    if accepted is not None:
        choice = Choice(name, "*", step_kind, accepted.provider, "backend", accepted.version)
        return accepted.call, replace(choice, rejected=rejected)
    if name not in _BUILDERS:
        reason = "neither offered by the backend nor composed by core"
        own = Refusal("core", f"stage:{name}", reason, "a backend that offers it")
        raise Refused(
            [own, *(refusal for each in rejected for refusal in each.refusals)], f"stage {name!r}"
        )
    first = FirstStep(context.ops)
    call = first.begins(_BUILDERS[name](replace(context, layer=None, ops=first.ops), {}))
    return call, Choice(name, "*", step_kind, COMPOSE, "core", rejected=rejected)


def _first_accepted(
    candidates: Sequence[Candidate],
) -> tuple[Accepted | None, tuple[Rejected, ...]]:
    """The first candidate that serves, and those passed over on the way to it."""
    rejected: list[Rejected] = []
    for candidate in candidates:
        if isinstance(candidate, Accepted):
            return candidate, tuple(rejected)
        rejected.append(candidate)
    return None, tuple(rejected)


def _all_composed(context: StageContext, choices: Sequence[Choice]) -> bool:
    """Whether attention may choose its form: asked to, with parts and ops of core's own alone."""
    ops = ("sparse_mla", "window_mla", "gather_kv", "head_gemm")
    return (
        context.mla_form == "auto"
        and all(choice.provider == COMPOSE and not choice.rejected for choice in choices)
        and all(context.ops[op] is COMPOSED[op] for op in ops)
    )


def _bind_stage(
    name: str, session: Session, context: StageContext, shape: StepShape
) -> tuple[Callable[..., Any], list[Choice]]:
    spec: LayerSpec = context.spec
    flagged = name == "attention" and context.mla_form == "unabsorbed"
    # A form asked for by flag is core's own composition: other candidates don't have it.
    holds_flag = context.mla_form == "unabsorbed" and name in ("decoder_layer", "attention")
    candidates = () if holds_flag else session.providers(name, spec, shape)
    accepted, rejected = _first_accepted(candidates)
    if accepted is not None:
        choice = Choice(name, spec.kind, shape.kind, accepted.provider, "backend", accepted.version)
        return accepted.call, [replace(choice, rejected=rejected)]
    children: dict[str, Callable[..., Any]] = {}
    choices: list[Choice] = []
    wanted = ("select",) if flagged else STAGES[name].children
    for child in wanted:
        if child == "select" and not spec.owns_index:
            continue
        children[child], more = _bind_stage(child, session, context, shape)
        choices += more
    build = unabsorbed.attention if flagged else _BUILDERS[name]
    provider = "compose:unabsorbed" if flagged else ("parts" if children else COMPOSE)
    by = "flag" if flagged else "core"
    if name == "attention" and _all_composed(context, choices):
        # Nobody else has a part in it, so the form may follow the rows of each piece.
        build, provider = unabsorbed.attention, f"{COMPOSE}:auto"
        choices = [choice for choice in choices if choice.part == "select"]
    own = Choice(name, spec.kind, shape.kind, provider, by, rejected=rejected)
    return build(context, children), [own, *choices]
