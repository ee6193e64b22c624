"""What an engine holds of its backend, opened and closed together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from ml4core import registry
from ml4core.api import Deployment, Refused, Session
from ml4core.engine.args import EngineArgs
from ml4core.engine.collectives import ranks_of
from ml4core.engine.deadline import GRACE_S, TimedSteps
from ml4core.engine.errors import RequestError
from ml4core.engine.model_files import ModelFiles
from ml4core.engine.ranks.fingerprint import check_fingerprints
from ml4core.engine.runner import ModelRunner
from ml4core.engine.steps import StepRunner
from ml4core.models.errors import CheckpointError
from ml4core.models.weight_reader import Progress
from ml4core.planning.kv import Pools

if TYPE_CHECKING:
    from ml4core.engine.ranks.ranks import Ranks
    from ml4core.engine.replicas.lock_step import LockStep

_OWN = (Refused, RequestError, CheckpointError, MemoryError)
"""What another replica's end never looks like."""


class Parts:
    """A session, the steps that are run in it, and the other ranks and replicas, if there are any.

    Attributes:
        steps: what the core runs, once that is there.
        ranks: None for a deployment of one, and for one whose session spans those of its replica.
        lock_step: None for a deployment of one replica.
    """

    def __init__(self, ranks: Ranks | None = None, lock_step: LockStep | None = None) -> None:
        self.ranks = ranks
        self.lock_step = lock_step
        self.steps: StepRunner | None = None
        self._session: Session | None = None

    @classmethod
    def start(
        cls, args: EngineArgs, choice: registry.Choice, files: ModelFiles, deployment: Deployment
    ) -> Parts:
        """With the other replicas, which were launched alike, and the processes of this one's
        ranks, which have opened nothing yet.
        """
        name = choice.plugin.record.name
        lock_step = None
        if deployment.data_parallel_size > 1:
            from ml4core.engine.replicas.opening import meet  # imports what one alone doesn't need

            lock_step = meet(args, deployment, name)
        parts = cls(None, lock_step)
        alone = deployment.data_parallel_size == 1 or deployment.spanning_session
        if ranks_of(deployment) == 1 and alone:
            return parts
        from ml4core.engine.ranks.opening import place_of
        from ml4core.engine.ranks.ranks import Ranks

        try:
            place, store = place_of(deployment, lock_step)
            devices = [found.device for found in choice.devices]
            parts.ranks = Ranks(files.local(args), name, devices, place, store)
        except BaseException as error:
            try:
                parts.fail(error)
            finally:
                parts.close()
            raise
        return parts

    @property
    def alarms(self) -> tuple[int, ...]:
        """Descriptors that can be read from when others have something to say."""
        return tuple(one.alarm for one in (self.ranks, self.lock_step) if one is not None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around all that ranks and replicas do as the engine starts. The others are told what goes
        wrong here; ``ReplicaLostError`` for what went wrong there before.
        """
        try:
            with nullcontext() if self.ranks is None else self.ranks.together():
                yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tells the other replicas why there is nothing to wait for. Raises ``ReplicaLostError`` if
        they have failed before.
        """
        if self.lock_step is None:
            return
        from ml4core.engine.replicas.lock_step import SETTLE_S, ReplicaLostError

        if isinstance(error, ReplicaLostError):
            return
        sure = isinstance(error, _OWN) or not isinstance(error, Exception)
        before = self.lock_step.fault(0, 0.0 if sure else SETTLE_S)
        if before is not None:
            raise ReplicaLostError(before.message) from error
        self.lock_step.fail("start", registry.describe(error))

    def open(self, choice: registry.Choice, deployment: Deployment) -> ModelRunner:
        """The runner of this process's rank, in a session. Raises as ``open_session`` does."""
        name, capabilities = choice.backend.name, choice.capabilities
        if self.ranks is None:
            self._session = registry.open_session(choice.plugin, deployment)
            return ModelRunner(self._session, name, deployment, capabilities)
        from ml4core.engine.ranks import group
        from ml4core.engine.ranks.runner import FirstRunner

        check_fingerprints(deployment, self.ranks.ask("prepare"))
        self.ready()  # one that can't even start must not be waited for in a group
        self.ranks.join()

        def own() -> ModelRunner:
            assert self.ranks is not None
            self._session = registry.open_session(choice.plugin, deployment)
            return FirstRunner(self._session, name, deployment, capabilities, self.ranks)

        runner, _ = self.ranks.alongside("open", own)
        self.ready()
        group.wait_for_ever()
        return runner

    def load(
        self,
        files: ModelFiles,
        runner: ModelRunner,
        deployment: Deployment,
        progress: Progress | None = None,
    ) -> None:
        """Each rank's weights; ``progress`` is told of this one's."""
        ranks, lock_step = self.ranks, self.lock_step

        def told(done: int, total: int) -> None:
            # One that failed is not to be found out at the end.
            if ranks is not None:
                ranks.check()
            if lock_step is not None:
                lock_step.check()
            if progress is not None:
                progress(done, total)

        def own() -> None:
            files.load(runner, deployment, told)

        if ranks is None:
            own()
        else:
            ranks.alongside("load", own)

    def settle(self, pools: Pools) -> Pools:
        """Those for which all replicas have room."""
        if self.lock_step is None:
            return pools
        all_blocks = self.lock_step.exchange(dict(pools.blocks))
        least = {name: min(blocks[name] for blocks in all_blocks) for name in pools.blocks}
        return replace(pools, blocks=least)

    def ready(self) -> None:
        """Waits for the other replicas to come so far. Raises ``ReplicaLostError``."""
        if self.lock_step is not None:
            self.lock_step.exchange(None)

    def close(self) -> None:
        """All of it; but for a session within which a step never ended: its thread may use it for
        as long as the process lives.
        """
        if self.lock_step is not None:
            self.lock_step.leave()  # before they see what that breaks
        ended = not isinstance(self.steps, TimedSteps) or self.steps.close()
        if self.ranks is not None and ended:
            self.ranks.ask_to_stop()
        elif self.ranks is not None and isinstance(self.steps, TimedSteps):
            self.ranks.kill()  # what waits for them ends
            ended = self.steps.close(GRACE_S)
        try:
            if self._session is not None and ended:
                self._session.close()
        finally:
            if self.ranks is not None:
                self.ranks.close(inside=not ended)
            if self.lock_step is not None:
                self.lock_step.close()
