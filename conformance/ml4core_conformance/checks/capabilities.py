"""A backend does what it declares, and declares what it does."""

from __future__ import annotations

from collections.abc import Iterator

from ml4core.api import (
    OPS,
    STAGES,
    VOCABULARY,
    Accepted,
    LayerSpec,
    Refused,
    Segment,
    Session,
    StepShape,
    VisionShape,
)
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.registry import describe
from ml4core_conformance import tiny
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import all_cases
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.refusing import fields, prove_refusal
from ml4core_conformance.subject import Subject

_UNKNOWN = ("kv:x-ml4core-conformance/unheard", "index:x-ml4core-conformance/unheard")
"""Private layouts that no backend has."""
_NONE = Segment(0, 0, 0)
_PAGES = (("latent", 1), ("index", 1))
_SHAPES = (
    StepShape(Segment(2, 2, 1), _NONE, _NONE, _PAGES, 2),
    StepShape(_NONE, Segment(2, 8, 4), _NONE, _PAGES, 8),
    StepShape(_NONE, _NONE, Segment(2, 40, 32), _PAGES, 2),
)


def checks() -> list[Check]:
    over = (
        (
            "parts",
            _over_parts,
            "Each declared op is offered, or composed where feature:compose is declared, and runs "
            "on a plain case; each declared stage has a provider that accepts some layer and step "
            "of a small model. A failure means that deployments which are let in will die.",
        ),
        (
            "layouts",
            _over_layouts,
            "A deployment of each declared cache layout opens, and gives a cache. A failure means "
            "that the layout is declared, and refused or not there.",
        ),
        (
            "formats",
            _over_formats,
            "A deployment of each declared weight format and activation opens, and an op that "
            "needs it runs on a plain case. A failure means that it is declared without being "
            "there.",
        ),
    )
    under = (
        (
            "parts",
            _under_parts,
            "No op is offered, and no stage provided, that isn't declared: core would bind what "
            "nobody has judged.",
        ),
        (
            "words",
            _under_words,
            "A deployment that needs a word which isn't declared is refused, naming it: each word "
            "alone, then all at once. A failure means that something unjudged runs in silence, or "
            "that an operator learns of one reason after the other.",
        ),
    )
    return [
        Check(family, "ops", run, doc, variant=variant, unit=f"{family}/{variant}")
        for family, rows in (("caps.over", over), ("caps.under", under))
        for variant, run, doc in rows
    ]


def _over_parts(subject: Subject) -> None:
    capabilities = subject.capabilities
    offered = subject.session.ops
    composed = "feature:compose" in capabilities
    for op in capabilities.names("op"):
        if op not in offered and not composed:
            raise CheckFailed(
                f"op:{op} is declared, and the session offers no op {op!r}; it offers "
                f"{', '.join(sorted(offered)) or 'none'}"
            )
        _runs(subject, f"op:{op}", [case for case in all_cases() if case.op == op])
    for stage in capabilities.names("stage"):
        if not any(_accepted(session, stage) for session in _sessions(subject)):
            raise CheckFailed(
                f"stage:{stage} is declared, and no provider accepts it for any layer of a small "
                "model in a decode, verify or prefill step"
            )


def _sessions(subject: Subject) -> Iterator[Session]:
    """The session of the defaults; then that of a deployment for the least latency, where it is
    declared, as a stage may be for it alone.
    """
    yield subject.session
    if "feature:latency_decode" in subject.capabilities:
        yield subject.session_for(frozenset({"feature:latency_decode"}))[0]


def _over_layouts(subject: Subject) -> None:
    for prefix in ("kv", "index"):
        for name in subject.capabilities.names(prefix):
            session = _opens(subject, f"{prefix}:{name}")
            if name.startswith("x-"):
                if name not in session.layouts:
                    raise CheckFailed(
                        f"{prefix}:{name} is declared, and the session has no such layout; it has "
                        f"{', '.join(sorted(session.layouts)) or 'none'}"
                    )
                layout = session.layouts[name]
            else:
                layout = latent_layout(name) if prefix == "kv" else index_layout(name)
            size = int(subject.capabilities.defaults.get("block_size", "64"))
            try:
                session.alloc_kv(layout, 2, size)
            except Exception as error:
                raise CheckFailed(
                    f"{prefix}:{name} is declared, and alloc_kv of 2 pages of {size} tokens raises "
                    f"{describe(error)}"
                ) from error


def _over_formats(subject: Subject) -> None:
    for prefix in ("weights", "act"):
        for name in subject.capabilities.names(prefix):
            word = f"{prefix}:{name}"
            _opens(subject, word)
            _runs(subject, word, [case for case in all_cases() if word in case.requires])


def _under_parts(subject: Subject) -> None:
    capabilities, session = subject.capabilities, subject.session
    for op in session.ops:
        if op not in OPS:
            raise CheckFailed(f"the session offers {op!r}, which is not in the table of ops")
        if f"op:{op}" not in capabilities:
            raise CheckFailed(f"the session offers op {op!r}, and op:{op} is not declared")
    for stage in STAGES:
        if f"stage:{stage}" not in capabilities and (by := _accepted(session, stage)):
            raise CheckFailed(f"{by!r} provides stage {stage}, and stage:{stage} is not declared")


def _under_words(subject: Subject) -> None:
    missing = subject.capabilities.missing(VOCABULARY | {*_UNKNOWN})
    for word in missing:
        prove_refusal(subject, [word])
    prove_refusal(subject, missing)


def _opens(subject: Subject, word: str) -> Session:
    try:
        return subject.open(subject.deployment(**fields([word])))
    except Refused as refused:
        raise CheckFailed(
            f"{word} is declared, and a deployment that needs it is refused: {refused}"
        ) from None


def _runs(subject: Subject, word: str, cases: list[OpCase]) -> None:
    """Calls the first small case, else the first, of those whose words are all declared."""
    able = [
        case
        for case in cases
        if not subject.capabilities.missing(case.requires | {f"op:{case.op}"})
    ]
    for case in sorted(able, key=lambda case: not case.small)[:1]:
        try:
            subject.evaluate(case, subject.seeds[0])
        except Exception as error:
            raise CheckFailed(
                f"{word} is declared, and op {case.op!r} raises at case {case.id}: "
                f"{describe(error)}"
            ) from error


def _accepted(session: Session, stage: str) -> str:
    """The first provider that accepts the stage for some layer and step; empty if none does."""
    for layer, shape in _occasions(stage):
        for candidate in session.providers(stage, layer, shape):
            if isinstance(candidate, Accepted):
                return candidate.provider
    return ""


def _occasions(stage: str) -> Iterator[tuple[LayerSpec | None, StepShape | VisionShape]]:
    if stage == "vision_encoder":
        yield None, VisionShape(16)
        return
    layers = tiny.model().layers if STAGES[stage].per_layer else (None,)
    for layer in layers:
        for shape in _SHAPES:
            yield layer, shape
