"""Candidates for stages, best first; those that can't serve come before those that can, so that the
start-up report tells their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import environ
from typing import Any

from ml4core.api import Accepted, Candidate, Deployment, LayerSpec, Refusal, Rejected, StepShape
from ml4core_rocm import aiter_functions, switches
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.latency import provider
from ml4core_rocm.providers import peers

_CALLS = ("sparse_mla", "select")
"""Stages that AITER may serve."""


class Stages:
    """The candidates of one session; its layers share what AITER plans once a step."""

    def __init__(self, deployment: Deployment, environment: Mapping[str, str] = environ) -> None:
        self._deployment = deployment
        self._declared = capabilities(deployment.device)
        self._environment = environment
        self._switches, _ = switches.read(deployment, self._declared, environment)
        self._plans: Any = None

    def candidates(
        self, stage: str, layer: LayerSpec | None, shape: StepShape
    ) -> Sequence[Candidate]:
        if layer is None:
            return ()
        if stage == "decoder_layer":
            found = (layer, shape, self._deployment, self._declared, self._environment)
            return provider.candidates(*found)
        if stage not in _CALLS or not self._switches.use_aiter:
            return ()
        return self._aiter(stage, layer, shape)

    def _aiter(self, stage: str, layer: LayerSpec, shape: StepShape) -> Sequence[Candidate]:
        """AITER's ways. Ours are ops, of which core composes the stage."""
        rejected: list[Candidate] = []
        accepted: list[Candidate] = []
        for peer in peers(stage):
            found = peer.reasons(layer, self._deployment, self._switches, aiter_functions.refusals)
            if stage == "select":
                found = (*_of_shape(peer.name, shape), *found)
            if found:
                rejected.append(Rejected(peer.name, found))
            else:
                call = self._mla(layer) if stage == "sparse_mla" else _select(layer)
                accepted.append(Accepted(peer.name, call, aiter_functions.release()))
        return (*rejected, *accepted)

    def _mla(self, layer: LayerSpec) -> Callable[..., object]:
        from ml4core_rocm.kernels.aiter_mla import StepPlans, stage

        if self._plans is None:
            self._plans = StepPlans()
        return stage(layer, self._plans)


def _select(layer: LayerSpec) -> Callable[..., object]:
    from ml4core_rocm.kernels.aiter_select import select_stage

    return select_stage(layer)


def _of_shape(name: str, shape: StepShape) -> Iterator[Refusal]:
    if shape.prefill.rows:
        reason = f"its scores of {shape.prefill.rows} rows of prompts need lengths on the host"
        yield Refusal("rocm", name, reason)
    if any(one.rows != one.requests * one.max_rows for one in (shape.decode, shape.verify)):
        yield Refusal("rocm", name, "requests of a segment have different counts of rows")
