"""Steps whose rows and caches stay on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ml4core.api import DraftStep, StepOutput, StepPlan, StepShape
from ml4core_tpu.buckets import Buckets
from ml4core_tpu.device_memory import told_when_full
from ml4core_tpu.executor import BucketExecutor, Step
from ml4core_tpu.programs import Programs

if TYPE_CHECKING:
    from ml4core.api import ModelSpec
    from ml4core_tpu.kernels.resident.stage import ResidentLayers


class ResidentExecutor(BucketExecutor):
    """What leaves a step is its logits and its fault, on the host; rows after tapped layers stay on
    the devices. Programs depend on the size of the pools, so they are compiled anew for caches of
    another.
    """

    def __init__(
        self,
        model: ModelSpec,
        dtype: torch.dtype,
        layers: ResidentLayers,
        programs: Programs,
        buckets: Buckets,
        product: Callable[..., object],
        warm_up: bool,
    ) -> None:
        super().__init__(model, dtype, layers, programs, buckets, product, warm_up)
        self._resident = layers
        self._warms_up = warm_up
        self._warm_for: tuple[int, ...] = ()
        self._drafts_warm_for: tuple[int, ...] = ()

    def compile(self, step: Step, shape: StepShape) -> Step:
        from ml4core_tpu.kernels.resident.tensor import host_of

        def run(weights: Any, plan: Any, kv: Any) -> StepOutput:
            with told_when_full("a step didn't fit the devices' memory"):
                if isinstance(plan, StepPlan):
                    self._warm(weights, plan, kv)
                elif isinstance(plan, DraftStep):
                    self._warm_drafts(step, weights, kv)
                with self._resident.step(), self._programs.step():
                    found = step(weights, plan, kv)
                    # The plan's tensors are the engine's again: so the devices have to be done.
                    return StepOutput(host_of(found.logits), found.taps, host_of(found.fault))

        return run

    def _warm(self, weights: Any, plan: StepPlan, kv: Any) -> None:
        from ml4core_tpu.kernels.resident.stage import TRIAL_PAGES

        sizes = tuple(
            sorted({one.blocks for held in (kv.latent, kv.index_keys) for one in held.values()})
        )
        if self._warms_up and sizes != self._warm_for and min(sizes) > TRIAL_PAGES:
            self._programs.cool()
            self._warm_up(weights, plan, kv)
            self._warm_for = sizes

    def _warm_drafts(self, step: Step, weights: Any, kv: Any) -> None:
        from ml4core_tpu.kernels.resident.stage import TRIAL_PAGES
        from ml4core_tpu.kernels.resident.warm import padding_drafts

        draft, sizes = self._model.draft, tuple(sorted({cache.blocks for cache in kv}))
        if not self._warms_up or draft is None or sizes == self._drafts_warm_for:
            return
        if min(sizes) > TRIAL_PAGES:
            plans = padding_drafts(
                draft,
                self._resident.devices,
                self._buckets.tokens,
                self._buckets.most_requests,
                self._dtype,
            )
            for plan in plans:
                step(weights, plan, kv)
            self._drafts_warm_for = sizes

    def _warm_between(self, weights: Any) -> None:
        """What core asks for between layers, and of the last one's rows."""
        from ml4core_tpu.kernels.resident.warm import warm_between

        most = self._model.draft.depth + 1 if self._model.draft else 1
        logits = self._buckets.most_requests * most
        warm_between(
            self._resident.devices,
            self._buckets.tokens,
            logits,
            (self._model.hidden_size, self._dtype),
            len(self._model.taps),
            lambda rows: self._product(rows, weights.top["output"], torch.float32),
        )
