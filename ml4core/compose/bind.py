"""Binding: for each layer and step shape the largest stage that a provider accepts, and the record
of each choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ml4core.api import (
    OPS,
    STAGES,
    Accepted,
    Capabilities,
    LayerSpec,
    ModelSpec,
    Refusal,
    Refused,
    Rejected,
    Session,
    StepShape,
)
from ml4core.compose import attention, ffn, layer, unabsorbed
from ml4core.compose.context import StageContext
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
    """A callable a layer, in layer order, each with the signature of ``decoder_layer``; and the ops
    outside of layers.
    """

    model: ModelSpec
    layers: tuple[Callable[..., Any], ...]
    ops: Mapping[str, Callable[..., Any]]
    choices: tuple[Choice, ...]


def bind_ops(
    session: Session, capabilities: Capabilities, backend: str
) -> tuple[Mapping[str, Callable[..., Any]], tuple[Choice, ...]]:
    """The op table of a session: its own ops, then core's compositions if ``feature:compose`` is
    declared.

    Raises ``Refused`` for each op that nobody gives, and for each own op that the contract table
    doesn't know.
    """
    own = session.ops
    problems = [
        Refusal(backend, f"op:{name}", "is not in the op table", "a name of ml4core.api.OPS")
        for name in own
        if name not in OPS
    ]
    compose = "feature:compose" in capabilities
    bound: dict[str, Callable[..., Any]] = {}
    choices: list[Choice] = []
    for name in OPS:
        if name in own:
            bound[name] = own[name]
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
    """Binds each layer of ``context.model`` for a step shape. ``context.layer`` is ignored."""
    found: dict[tuple[str, str], Choice] = {}
    layers: list[Callable[..., Any]] = []
    for spec in context.model.layers:
        call, choices = _bind_stage("decoder_layer", session, replace(context, layer=spec), shape)
        layers.append(call)
        for choice in choices:
            key = (choice.part, choice.layer_kind)
            first = found.setdefault(key, choice)
            found[key] = replace(first, layers=(*first.layers, spec.index))
    return BoundModel(context.model, tuple(layers), context.ops, tuple(found.values()))


def _bind_stage(
    name: str, session: Session, context: StageContext, shape: StepShape
) -> tuple[Callable[..., Any], list[Choice]]:
    spec: LayerSpec = context.spec
    flagged = name == "attention" and context.mla_form == "unabsorbed"
    rejected: list[Rejected] = []
    # A form asked for by flag is core's own composition: other candidates don't have it.
    holds_flag = context.mla_form == "unabsorbed" and name in ("decoder_layer", "attention")
    for candidate in () if holds_flag else session.providers(name, spec, shape):
        if isinstance(candidate, Accepted):
            choice = Choice(
                name,
                spec.kind,
                shape.kind,
                candidate.provider,
                "backend",
                candidate.version,
                rejected=tuple(rejected),
            )
            return candidate.call, [choice]
        rejected.append(candidate)
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
    own = Choice(name, spec.kind, shape.kind, provider, by, rejected=tuple(rejected))
    return build(context, children), [own, *choices]
