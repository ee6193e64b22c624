"""Runs steps: weights, caches and the forward bound to a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ml4core.api import (
    Capabilities,
    Deployment,
    Fault,
    FaultError,
    LayerSpec,
    Session,
    StepOutput,
    StepPlan,
    StepShape,
    Weight,
)
from ml4core.compose.bind import BoundModel, Choice, bind_model, bind_ops
from ml4core.compose.context import StageContext
from ml4core.engine.collectives import SingleRank
from ml4core.engine.kv_pool import KVPlan, allocate
from ml4core.models.mistral_large4 import KVState, ModelWeights, forward

MAX_PROGRAMS = 256
"""Step shapes whose programs are kept, those used last. A program of a large model takes some
hundred kilobytes on the host, and prompts have as many shapes as lengths.
"""

LayerStream = Iterable[tuple[LayerSpec | None, Mapping[str, torch.Tensor | Weight]]]


class ModelRunner:
    """One rank's model. ``step`` runs a plan; after a fault it refuses for good."""

    def __init__(
        self, session: Session, backend: str, deployment: Deployment, capabilities: Capabilities
    ) -> None:
        ops, self._op_choices = bind_ops(session, capabilities, backend)
        self.session = session
        self.spec = deployment.model
        self.ops = ops
        self._context = StageContext(
            model=deployment.model,
            layer=None,
            ops=ops,
            collectives=session.collectives or SingleRank(),
            dtype=getattr(torch, deployment.dtype),
            mla_form=str(deployment.attention_config.get("mla_form", "auto")),
        )
        self._bound: dict[StepShape, tuple[BoundModel, Callable[..., StepOutput]]] = {}
        self._steps = 0
        self._fault: Fault | None = None
        self.weights: ModelWeights | None = None
        self.kv: KVState | None = None

    def load(self, layers: LayerStream) -> None:
        """Lays out the weights, one layer at a time."""
        top: Mapping[str, Any] = {}
        done: list[Mapping[str, Any]] = []
        for spec, weights in layers:
            prepared = self.session.prepare_weights(weights, spec)
            del weights  # else one layer's source stays alive while the next is read
            if spec is None:
                top = prepared
            else:
                done.append(prepared)
        if not top or len(done) != len(self.spec.layers):
            raise ValueError(
                f"the model has {len(self.spec.layers)} layers, {len(done)} were loaded"
            )
        self.weights = ModelWeights(top, tuple(done))

    def allocate_kv(self, plan: KVPlan) -> None:
        """Allocates the caches; ``self.pools`` then hands out their pages."""
        self.kv, self.pools = allocate(self.session, plan)
        self.block_size = plan.block_size

    def choices(self, shape: StepShape) -> tuple[Choice, ...]:
        """Who serves which part at this shape: the start-up report."""
        return (*self._bind(shape)[0].choices, *self._op_choices)

    def _bind(self, shape: StepShape) -> tuple[BoundModel, Callable[..., StepOutput]]:
        found = self._bound.pop(shape, None)
        if found is None:
            if len(self._bound) >= MAX_PROGRAMS:
                del self._bound[next(iter(self._bound))]
            bound = bind_model(self.session, self._context, shape)

            def step(weights: ModelWeights, plan: StepPlan, kv: KVState) -> StepOutput:
                return forward(bound, weights, plan, kv)

            found = (bound, self.session.executor.compile(step, shape))
        self._bound[shape] = found  # to the end: the first is the one used longest ago
        return found

    def step(self, plan: StepPlan) -> StepOutput:
        """Runs the plan. Raises ``FaultError``; then no result of this step leaves and no later
        step runs.
        """
        output = self.launch(plan)
        self.check(output)
        return output

    def launch(self, plan: StepPlan) -> StepOutput:
        """Queues the plan on the device. Nothing of the output may leave before ``check``."""
        if self._fault is not None:
            raise FaultError(self._fault)
        if self.weights is None or self.kv is None:
            raise RuntimeError("load() and allocate_kv() come before step()")
        self._steps += 1
        with torch.inference_mode():
            return self._bind(plan.shape)[1](self.weights, plan, self.kv)

    def check(self, output: StepOutput) -> None:
        """Waits for a step that was launched, and raises ``FaultError`` if it, or one since, has
        failed.
        """
        fault = self._fault or self.session.fault()
        if fault is None and bool(output.fault):
            fault = Fault(
                "nan", "a NaN reached the index scores or the logits of a request", self._steps
            )
        if fault is not None:
            self._fault = self._fault or replace(fault, step=self._steps)
            raise FaultError(self._fault)
