"""What is refused, by whom, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ml4core import registry
from ml4core.api import VOCABULARY, Deployment, Refusal, Refused
from ml4core_conformance import tiny
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.refusing import fields
from ml4core_conformance.rigs.child import ChildFailed, ask
from ml4core_conformance.rigs.engines import Log, Watched, checkpoint, choice_of
from ml4core_conformance.rigs.watch import watched
from ml4core_conformance.subject import Subject

_PER_PREFIX = 2
"""Undeclared words of each prefix that make the table of bad deployments."""


_SMALL = 4096
"""Values of a tensor that a refusal may make on its way, for a look at versions and the like."""
_SWITCH = "no_such_switch"
_UNKNOWN = "kv:x-ml4core-conformance/unheard"


def checks() -> list[Check]:
    return [
        Check(
            "system.refusal",
            "system",
            run,
            doc,
            variant=variant,
            unit=f"system.refusal/{variant}",
            timeout_s=180.0,
        )
        for variant, run, doc in _ROWS
    ]


def _bad_words(subject: Subject) -> list[str]:
    """Words that the backend doesn't declare, a few of each prefix."""
    found: dict[str, list[str]] = {}
    for word in subject.capabilities.missing(VOCABULARY):
        found.setdefault(word.partition(":")[0], []).append(word)
    words = [word for group in found.values() for word in group[:_PER_PREFIX]]
    return [*words, _UNKNOWN]


def _reasons(subject: Subject, deployment: Deployment) -> tuple[Refusal, ...]:
    """Why a deployment is refused; none if it opens. Nothing may have been allocated by then."""

    def refused() -> tuple[Refusal, ...]:
        try:
            session = subject.backend.open(deployment)
        except Refused as refusal:
            return refusal.refusals
        session.close()
        return ()

    before = _device_bytes(subject)
    reasons, watch = watched(refused)
    if reasons and (called := watch.collectives()):
        raise CheckFailed(
            f"{called[0]} was called before the deployment was refused, and would wait for ranks "
            f"that are refused otherwise: {_named(reasons)}"
        )
    if reasons and watch.largest() > _SMALL:
        raise CheckFailed(
            f"a tensor of {watch.largest()} values was made before the deployment was refused: "
            f"{_named(reasons)}"
        )
    if reasons and _device_bytes(subject) > before:
        raise CheckFailed(f"memory was taken on the device, and then refused: {_named(reasons)}")
    return tuple(reasons)


def _device_bytes(subject: Subject) -> int:
    if subject.torch_device.type == "cpu":
        return 0
    module = torch.get_device_module(subject.torch_device)
    return int(module.memory_allocated()) if hasattr(module, "memory_allocated") else 0


def _named(reasons: Iterable[Refusal]) -> str:
    return ", ".join(sorted({reason.subject for reason in reasons})) or "none"


def refusal_open(subject: Subject) -> None:
    words = _bad_words(subject)
    model = tiny.model(layers=4)
    alone = {word: _reasons(subject, subject.deployment(model, **fields([word]))) for word in words}
    silent = [word for word, reasons in alone.items() if not reasons]
    if silent:
        raise CheckFailed(f"deployments open that need what is not declared: {', '.join(silent)}")
    everything = subject.deployment(model, **fields(words))
    together = _reasons(subject, everything)
    held = {reason.subject for reason in together}
    for word, reasons in alone.items():
        if lost := {reason.subject for reason in reasons} - held:
            raise CheckFailed(
                f"of {len(words)} faults of one deployment, {word} is not told: its reasons "
                f"({', '.join(sorted(lost))}) are not among {_named(together)}"
            )
    if list(together) != sorted(set(together)):
        raise CheckFailed("reasons are not sorted and unique, so ranks print different lists")
    if _reasons(subject, everything) != together:
        raise CheckFailed("the same deployment is refused for other reasons the second time")
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if joined:
        raise CheckFailed("a process group was joined before the deployment was refused")
    for rank in ("0", "1"):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        try:
            answer = ask(
                "refuse",
                subject.backend,
                limit_s=60.0,
                deployment=everything,
                environment=environment,
            )
        except ChildFailed as failure:
            raise CheckFailed(f"on rank {rank} of 2: {failure}") from None
        found = [Refusal(**reason) for reason in answer["reasons"]]
        if found != list(together):
            raise CheckFailed(
                f"rank {rank} of 2 gives the reasons {_named(found)}; alone it is "
                f"{_named(together)}"
            )


def refusal_flags(subject: Subject) -> None:
    from ml4core.engine.args import EngineArgs
    from ml4core.engine.llm import open_engine

    missing = subject.capabilities.missing({"parallel:tp", "parallel:pp", "parallel:dp"})
    flags: dict[str, Any] = {"additional_config": {"no_such_option": 1}}
    sizes = {"parallel:tp": "tensor", "parallel:pp": "pipeline", "parallel:dp": "data"}
    for word in missing:
        flags[f"{sizes[word]}_parallel_size"] = 2
    log = Log()
    with checkpoint(layers=4) as folder:
        choice = choice_of(subject, partial(Watched, log=log))
        args = EngineArgs(str(folder), **flags)

        def refused() -> Refused | None:
            try:
                open_engine(args, choice=choice).close()
            except Refused as refusal:
                return refusal
            return None

        refusal, watch = watched(refused)
    if refusal is None:
        raise CheckFailed(f"an engine opens with the flags {flags}")
    text = str(refusal)
    untold = [word for word in (*missing, "no_such_option") if not _tells(refusal, word)]
    if untold:
        raise CheckFailed(f"{', '.join(untold)} is not among the reasons: {text}")
    if log.opened or log.allocated or watch.largest() > _SMALL:
        raise CheckFailed(
            f"{log.opened} sessions were opened, {log.allocated} caches and a tensor of "
            f"{watch.largest()} values made before these flags were refused"
        )


def _tells(refusal: Refused, word: str) -> bool:
    """Whether a reason names a word, or the flag that asks for it."""
    flag = {"tp": "tensor", "pp": "pipeline", "dp": "data"}.get(word.partition(":")[2], word)
    return any(
        word in reason.subject or flag in reason.subject or word in reason.reason
        for reason in refusal.refusals
    )


def refusal_switches(subject: Subject) -> None:
    """Keys of ``additional_config`` that nothing reads: of the whole, and of the backend's own."""
    model, name = tiny.model(layers=4), subject.backend.name
    own = dict(subject.options.get(name, {}))
    given: tuple[tuple[str, dict[str, Any]], ...] = (
        (_SWITCH, {_SWITCH: True}),
        (f"{_SWITCH}_of_{name}", {name: {**own, f"{_SWITCH}_of_{name}": True}}),
    )
    every: dict[str, Any] = dict(subject.options)
    for key, switches in given:
        every |= switches
        deployment = subject.deployment(model, additional_config={**subject.options, **switches})
        reasons = _reasons(subject, deployment)
        if not reasons:
            raise CheckFailed(f"additional_config {switches} is taken, and nothing reads it")
        if not _tells_key(reasons, key):
            raise CheckFailed(f"additional_config {switches}: no reason names {key}: {reasons}")
    deployment = subject.deployment(model, **fields([_UNKNOWN]), additional_config=every)
    reasons = _reasons(subject, deployment)
    for key in (*(key for key, _ in given), _UNKNOWN):
        if not _tells_key(reasons, key):
            raise CheckFailed(
                f"of several faults of one deployment, {key} is not told: {_named(reasons)}"
            )


def _tells_key(reasons: Iterable[Refusal], key: str) -> bool:
    words = (f"{reason.subject} {reason.reason}" for reason in reasons)
    return any(re.search(rf"(?<!\w){re.escape(key)}(?!\w)", text) for text in words)


def refusal_named(subject: Subject) -> None:
    name = subject.backend.name
    broken = registry.PluginRecord(name, "broken", "0", "ml4_no_such_module", (1, 1))
    other = registry.PluginRecord(f"{name}-other", "other", "0", "ml4core.cpu", (1, 1))
    try:
        choice = registry.select(name, records=[broken, other])
    except Refused as refusal:
        if "ml4_no_such_module" not in str(refusal):
            raise CheckFailed(f"a broken {name} is refused without its reason: {refusal}") from None
        return
    raise CheckFailed(f"--backend {name} is broken, and {choice.plugin.record} runs in its place")


_ROWS: tuple[tuple[str, Callable[[Subject], None], str], ...] = (
    (
        "open",
        refusal_open,
        "A deployment with several faults is refused once, with every reason that its faults "
        "have alone, on each rank alike, and before a collective or an allocation.",
    ),
    (
        "flags",
        refusal_flags,
        "Flags that can't be served, unknown options among them, are refused together, and no "
        "session is opened.",
    ),
    (
        "switches",
        refusal_switches,
        "A key of --additional-config that neither core nor the backend reads is refused by name, "
        "also among the backend's own, and with whatever else is wrong. A misspelt switch that is "
        "taken in silence leaves an operator with another deployment than was asked for.",
    ),
    (
        "named",
        refusal_named,
        "A backend that is asked for by name and can't run is refused; none takes its place.",
    ),
)
