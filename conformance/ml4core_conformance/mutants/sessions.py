"""Mutants of sessions: memory, drafts, and steps as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    KVCache,
    StepOutput,
    Weight,
)
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import AfterStep, AlteredSession, Changed


def mutants() -> list[Mutant]:
    rows: Sequence[tuple[str, str, Callable[[AlteredSession], None], tuple[str, ...]]] = (
        (
            "double-pages",
            "Each cache takes twice the memory that its pages need.",
            double_pages,
            ("model.kv_bytes",),
        ),
        (
            "source-kept",
            "What was read of a layer stays alive beside what is served from.",
            source_kept,
            ("model.load_memory",),
        ),
        (
            "drafts-accepted",
            "Every draft is accepted.",
            drafts_accepted,
            ("spec.greedy", "spec.distribution"),
        ),
        (
            "target-residual",
            "After a rejection the token is drawn from the target, not from what is left of it.",
            target_residual,
            ("spec.distribution",),
        ),
        (
            "closes-once",
            "A second close() fails.",
            closes_once,
            ("system.close",),
        ),
        (
            "outputs-kept",
            "The results of every step stay alive.",
            outputs_kept,
            ("system.leak", "perf.steady_state"),
        ),
        (
            "host-sync",
            "Each step waits for a number on the host.",
            host_sync,
            ("perf.steady_state",),
        ),
    )
    return [Mutant(name, doc, Changed(change), dies) for name, doc, change, dies in rows]


def double_pages(session: AlteredSession) -> None:
    allocate = session.inner.alloc_kv

    def call(layout: Any, blocks: int, block_size: int) -> KVCache:
        cache = allocate(layout, 2 * blocks, block_size)
        return replace(cache, parts=tuple(part[:blocks] for part in cache.parts))

    session.alloc_kv = call  # type: ignore[attr-defined]


def source_kept(session: AlteredSession) -> None:
    prepare, kept = session.inner.prepare_weights, []

    def call(weights: Any, layer: Any, part: str = "decoder") -> Any:
        kept.append(dict(weights))
        return {
            name: _copy(value)
            for name, value in prepare(weights, layer, part).items()  # type: ignore[arg-type]
        }

    session.prepare_weights = call  # type: ignore[attr-defined]


def _copy(value: Tensor | Weight) -> Tensor | Weight:
    if isinstance(value, Weight):
        return replace(value, parts={name: part.clone() for name, part in value.parts.items()})
    return value.clone()


def drafts_accepted(session: AlteredSession) -> None:
    draw = session.honest["sample"]

    def call(logits: Tensor, drafts: Tensor, given: Any, heat: Any, seeds: Any, at: Any) -> Any:
        last = draw(logits[:, -1], heat, seeds, at + drafts.shape[1])
        ids = torch.cat((drafts.clamp(min=0), last.unsqueeze(-1)), -1)
        return ids, torch.full_like(last, ids.shape[1])

    session.ops["verify_draft"] = call


def target_residual(session: AlteredSession) -> None:
    verify, draw = session.honest["verify_draft"], session.honest["sample"]

    def call(logits: Tensor, drafts: Tensor, given: Any, heat: Any, seeds: Any, at: Any) -> Any:
        ids, counts = verify(logits, drafts, given, heat, seeds, at)
        place = counts - 1
        rows = logits[torch.arange(len(logits), device=logits.device), place]
        fresh = draw(rows, heat, seeds + 1, at + place)
        rejected = (place < drafts.shape[1]).unsqueeze(-1)
        here = torch.arange(ids.shape[1], device=ids.device) == place.unsqueeze(-1)
        return torch.where(rejected & here, fresh.unsqueeze(-1), ids), counts

    session.ops["verify_draft"] = call


def outputs_kept(session: AlteredSession) -> None:
    kept: list[StepOutput] = []

    def after(output: StepOutput) -> StepOutput:
        kept.append(output)
        return output

    session.executor = AfterStep(session.inner.executor, after)


def host_sync(session: AlteredSession) -> None:
    def after(output: StepOutput) -> StepOutput:
        output.logits.sum().item()
        return output

    session.executor = AfterStep(session.inner.executor, after)


def closes_once(session: AlteredSession) -> None:
    closed: list[bool] = []

    def close() -> None:
        if closed:
            raise RuntimeError("it is closed")
        closed.append(True)

    session.close = close  # type: ignore[attr-defined]
