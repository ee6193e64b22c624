"""Rank 0's model: what needs all ranks, it has all of them do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ml4core.api import (
    Capabilities,
    Deployment,
    DeviceMemory,
    DraftOutput,
    DraftPlan,
    FaultError,
    MemoryFigures,
    Session,
    StepOutput,
    StepPlan,
)
from ml4core.engine.kv_pool import Pools
from ml4core.engine.ranks import group
from ml4core.engine.ranks.packing import pack
from ml4core.engine.ranks.plans import draft_tensors
from ml4core.engine.ranks.processes import SETTLE_S
from ml4core.engine.ranks.ranks import Ranks
from ml4core.engine.runner import ModelRunner


class FirstRunner(ModelRunner):
    """The runner of rank 0, whose calls the others make with it.

    A step in which another rank fails raises ``FaultError`` with that rank's reason.
    """

    def __init__(
        self,
        session: Session,
        backend: str,
        deployment: Deployment,
        capabilities: Capabilities,
        ranks: Ranks,
    ) -> None:
        own, replicas = group.collectives(ranks.place)
        super().__init__(
            session, backend, deployment, capabilities, collectives=own, replicas=replicas
        )
        self.ranks = ranks
        if self.memory is not None:
            self.memory = GroupMemory(self.memory, ranks)

    def allocate_kv(self, plan: Pools) -> None:
        def own() -> None:
            ModelRunner.allocate_kv(self, plan)

        self.free_kv()  # before the others have new ones
        self.ranks.alongside("allocate_kv", own, dict(plan.blocks), plan.block_size)

    def free_kv(self) -> None:
        """With what was captured, on the others."""
        if self.kv is not None:  # else there is none anywhere
            self.ranks.tell("free_kv")
        super().free_kv()

    def launch(self, plan: StepPlan) -> StepOutput:
        with self._together():
            tensors = plan.tensors()
            packed, buffer = pack(list(tensors.values()))
            self.ranks.tell("launch", plan.shape, tuple(tensors), packed)
            if buffer is not None:
                group.send(buffer)
            return super().launch(plan)

    def draft(self, plan: DraftPlan, taps: tuple[torch.Tensor, ...]) -> DraftOutput:
        """``taps``: of the last ``launch``, of which the others have their own."""
        with self._together():
            packed, buffer = pack(draft_tensors(plan))
            self.ranks.tell("draft", packed)
            if buffer is not None:
                group.send(buffer)
            return super().draft(plan, taps)

    def check(self, failed: torch.Tensor) -> None:
        if self._fault is None:
            self._fault = self.ranks.fault(self._steps)
        super().check(failed)

    @contextmanager
    def _together(self) -> Iterator[None]:
        if self._fault is None:
            self._fault = self.ranks.fault(self._steps)
        if self._fault is not None:
            raise FaultError(self._fault)
        try:
            with self.ranks.in_step():
                yield
        except Exception as error:
            self._fault = self.ranks.fault(self._steps, SETTLE_S)
            if self._fault is None:
                raise
            raise FaultError(self._fault) from error


class GroupMemory:
    """The memory of the ranks' devices as that of one on which each of them has room."""

    def __init__(self, own: DeviceMemory, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def figures(self) -> MemoryFigures:
        """This rank's alone where others can't answer any more."""
        own = self._own.figures()
        if not self._ranks.in_order:
            return own
        return tightest([own, *self._ranks.ask("figures")])

    def reset_peak(self) -> None:
        self._ranks.alongside("reset_peak", self._own.reset_peak)

    def release(self) -> None:
        self._ranks.alongside("release", self._own.release)


def tightest(ranks: list[MemoryFigures]) -> MemoryFigures:
    """Figures by which no rank has less room than they say: the most of what is in use, and free
    what is left beside it where least is.
    """
    total = min(one.total for one in ranks)
    allocated = max(one.allocated for one in ranks)
    room = min(one.free + one.allocated - (one.total - total) for one in ranks)
    kept = min(one.held - one.allocated for one in ranks)
    peak = max(one.peak for one in ranks)
    return MemoryFigures(total, max(0, room - allocated), allocated, allocated + kept, peak)
