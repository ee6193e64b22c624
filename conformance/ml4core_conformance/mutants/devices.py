"""Mutants that are not where they say: on the CPU, or, where that is declared, on ``meta``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, StepOutput, Weight
from ml4core.compose.ops import COMPOSED
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import AfterStep, AlteredSession, Changed, Op


def mutants() -> list[Mutant]:
    rows: Sequence[tuple[str, str, Callable[[AlteredSession], None]]] = (
        (
            "products-elsewhere",
            "Products are computed elsewhere than on the declared device, and brought back.",
            products_elsewhere,
        ),
        (
            "weights-elsewhere",
            "The weights of experts stay where they were read.",
            weights_elsewhere,
        ),
        ("caches-elsewhere", "Caches do not lie on the declared device.", caches_elsewhere),
        ("results-elsewhere", "Logits do not lie on the declared device.", results_elsewhere),
    )
    dies = ("system.device_honesty",)
    return [Mutant(name, doc, Changed(change), dies) for name, doc, change in rows]


def _elsewhere(session: AlteredSession) -> torch.device:
    kind = torch.device(session.deployment.device.torch_device).type
    return torch.device("meta" if kind == "cpu" else "cpu")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Weight):
        return replace(value, parts={name: one.to(device) for name, one in value.parts.items()})
    return value.to(device) if isinstance(value, Tensor) else value


def products_elsewhere(session: AlteredSession) -> None:
    elsewhere, honest = _elsewhere(session), session.honest["gemm"]

    def call(*args: Any) -> Any:
        found = COMPOSED["gemm"](*(_moved(arg, elsewhere) for arg in args))
        if elsewhere.type == "meta":  # it holds no numbers
            return honest(*args)
        return _moved(found, args[0].device)

    gemm: Op = call
    session.ops["gemm"] = gemm


def weights_elsewhere(session: AlteredSession) -> None:
    elsewhere, prepare = _elsewhere(session), session.inner.prepare_weights

    def call(*args: Any, **more: Any) -> Mapping[str, Tensor | Weight]:
        prepared = prepare(*args, **more)
        return {
            name: _moved(value, elsewhere) if name.startswith("experts") else value
            for name, value in prepared.items()
        }

    session.prepare_weights = call  # type: ignore[attr-defined]


def caches_elsewhere(session: AlteredSession) -> None:
    allocate = session.inner.alloc_kv

    def call(layout: Any, blocks: int, block_size: int) -> KVCache:
        cache = allocate(layout, blocks, block_size)
        return replace(cache, parts=tuple(part.to("meta") for part in cache.parts))

    session.alloc_kv = call  # type: ignore[attr-defined]


def results_elsewhere(session: AlteredSession) -> None:
    elsewhere = _elsewhere(session)

    def after(output: StepOutput) -> StepOutput:
        return output._replace(logits=output.logits.to(elsewhere))

    session.executor = AfterStep(session.inner.executor, after)
