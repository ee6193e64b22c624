"""The steps of one replica among those of all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ml4core.api import Fault, StepBuckets, StepShape
from ml4core.engine.deadline import TimedSteps
from ml4core.engine.padding import padding_step
from ml4core.engine.replicas.agreement import Wish
from ml4core.engine.replicas.lock_step import SETTLE_S, LockStep
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.steps import StepInput, StepRunner

_GREEDY = SamplingParams(temperature=0.0)
_UNSURE = "exception"
"""Code of a fault that may be no more than what another replica's end looks like from here."""


class Together:
    """Makes steps of one size on all replicas."""

    def __init__(
        self,
        lock_step: LockStep,
        buckets: StepBuckets,
        device: torch.device | str,
        steps: StepRunner | None = None,
    ) -> None:
        """``steps``: what runs them. Those with a time limit are given up once a replica has gone:
        they may wait for it.
        """
        self._lock_step = lock_step
        self._buckets = buckets
        self._device = device
        if isinstance(steps, TimedSteps):
            lock_step.watch(partial(self._look, steps))

    @property
    def pending(self) -> bool:
        """Whether others want to step, or to stop."""
        return self._lock_step.pending

    def agree(self, step: int, shape: StepShape, draws: bool) -> Wish:
        """The step that all run, in which one of this shape has room. Raises ``FaultError`` once a
        replica has failed.
        """
        agreed = self._lock_step.agree(Wish(shape, draws), step)
        assert agreed is not None, "this replica has work"
        return self._padded(agreed)

    def idle(self, step: int) -> StepInput | None:
        """A step of padding, to go along with others; None if none of them steps. Raises as
        ``agree``.
        """
        agreed = self._lock_step.agree(None, step)
        if agreed is None:
            return None
        shape, draws = self._padded(agreed)
        padding = padding_step(shape, self._device, _GREEDY, draws=0)
        return replace(padding, others_draw=draws)

    def stopped(self, fault: Fault) -> Fault:
        """Why all stop, if this replica has seen this fault: it, or what another has met before."""
        seconds = SETTLE_S if fault.code == _UNSURE else 0.0
        before = self._lock_step.fault(fault.step, seconds)
        if before is None:
            self._lock_step.fail(fault.code, fault.message)
        return before or fault

    def _look(self, steps: TimedSteps) -> None:
        fault = self._lock_step.fault(0)
        if fault is not None:
            steps.give_up(fault)

    def _padded(self, agreed: Wish) -> Wish:
        """Logits of segments that no replica has all of."""
        logits = self._buckets.padded("logits", agreed.shape.logits)
        return agreed._replace(shape=replace(agreed.shape, logits=logits))
