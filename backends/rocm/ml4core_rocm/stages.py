"""Candidates for stages, best first; those that can't serve come before those that can, so that the
start-up report tells their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import environ
from types import MappingProxyType
from typing import Any

from ml4core.api import Accepted, Candidate, Deployment, LayerSpec, Refusal, Rejected, StepShape
from ml4core_rocm import aiter_functions, switches
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.devices import release
from ml4core_rocm.inputs_stage import inputs_candidate
from ml4core_rocm.latency import provider
from ml4core_rocm.own_stages import OPS, own_candidate
from ml4core_rocm.providers import PROMPT_KEYS, RAGGED, Peer, peers


class Stages:
    """The candidates of one session; its layers share what AITER plans once a step. ``ops`` are
    the session's own.
    """

    def __init__(
        self,
        deployment: Deployment,
        environment: Mapping[str, str] = environ,
        ops: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self._deployment = deployment
        self._ops = ops
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
        if stage == "attn_inputs":
            return (inputs_candidate(layer, self._deployment, self._ops),)
        if stage not in OPS:
            return ()
        ours = own_candidate(stage, layer, self._ops)
        if not self._switches.use_aiter:
            return (ours,)
        rejected, accepted = self._aiter(stage, layer, shape)
        if isinstance(ours, Rejected):
            return (*rejected, ours, *accepted)
        return (*rejected, *accepted, ours)

    def _aiter(
        self, stage: str, layer: LayerSpec, shape: StepShape
    ) -> tuple[list[Rejected], list[Accepted]]:
        """AITER's ways, and what goes beside them."""
        rejected: list[Rejected] = []
        accepted: list[Accepted] = []
        for peer in peers(stage):
            found = peer.reasons(layer, self._deployment, self._switches, aiter_functions.refusals)
            if stage == "select":
                keys = dict(shape.pages).get("index", 0) * self._deployment.block_size
                found = (*_of_shape(peer.name, shape, keys), *found)
            if found:
                rejected.append(Rejected(peer.name, found))
            else:
                accepted.append(self._accepted(peer, layer))
        return rejected, accepted

    def _accepted(self, peer: Peer, layer: LayerSpec) -> Accepted:
        from ml4core_rocm.kernels.aiter_mla import StepPlans, stage
        from ml4core_rocm.kernels.ragged_stage import ragged_stage

        if peer.part == "select":
            return Accepted(peer.name, _select(layer), aiter_functions.release())
        if self._plans is None:
            self._plans = StepPlans()
        if peer.name == RAGGED:
            return Accepted(peer.name, ragged_stage(layer, self._plans), release())
        return Accepted(peer.name, stage(layer, self._plans), aiter_functions.release())


def _select(layer: LayerSpec) -> Callable[..., object]:
    from ml4core_rocm.kernels.aiter_select import select_stage

    return select_stage(layer)


def _of_shape(name: str, shape: StepShape, keys: int) -> Iterator[Refusal]:
    if shape.prefill.rows and keys < PROMPT_KEYS:
        reason = f"rows of prompts see {keys} keys at most here; its top-k for them pays from " + (
            f"{PROMPT_KEYS} on, as published"
        )
        yield Refusal("rocm", name, reason)
    if any(one.rows != one.requests * one.max_rows for one in (shape.decode, shape.verify)):
        yield Refusal("rocm", name, "requests of a segment have different counts of rows")
