"""Mutants of steps with images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ml4core.api import StepPlan, StepShape
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import AlteredSession, Changed


def mutants() -> list[Mutant]:
    return [
        Mutant(
            "stale-images",
            "A compiled step keeps the images that it was first given.",
            Changed(stale_images),
            ("model.images",),
        )
    ]


class _Keeping:
    """Compiles steps that hold on to the first embeddings of their shape."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compile(self, step: Callable[..., Any], shape: StepShape) -> Callable[..., Any]:
        honest, first = self._inner.compile(step, shape), []

        def call(weights: Any, plan: StepPlan, kv: Any) -> Any:
            if getattr(plan, "image_embeddings", None) is not None:
                first.append(plan.image_embeddings)
                plan = replace(plan, image_embeddings=first[0])
            return honest(weights, plan, kv)

        return call


def stale_images(session: AlteredSession) -> None:
    session.executor = _Keeping(session.inner.executor)
