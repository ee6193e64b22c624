"""What an engine holds of its backend, opened and closed together."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ml4core import registry
from ml4core.api import Deployment, Session
from ml4core.engine.args import EngineArgs
from ml4core.engine.deadline import GRACE_S, TimedSteps
from ml4core.engine.model_files import ModelFiles
from ml4core.engine.ranks.fingerprint import check_fingerprints
from ml4core.engine.runner import ModelRunner
from ml4core.engine.steps import StepRunner
from ml4core.models.weight_reader import Progress

if TYPE_CHECKING:
    from ml4core.engine.ranks.ranks import Ranks


class Parts:
    """A session, the steps that are run in it, and the other ranks, if there are any.

    Attributes:
        steps: what the core runs, once that is there.
        ranks: None for a deployment of one.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        self.steps: StepRunner | None = None
        self._session: Session | None = None

    @classmethod
    def start(
        cls, args: EngineArgs, choice: registry.Choice, files: ModelFiles, size: int
    ) -> Parts:
        """With the processes of so many ranks, which have opened nothing yet."""
        if size == 1:
            return cls()
        from ml4core.engine.ranks.ranks import Ranks  # imports what no rank alone needs

        return cls(
            Ranks(
                files.local(args),
                choice.plugin.record.name,
                [found.device for found in choice.devices],
                size,
            )
        )

    def together(self) -> AbstractContextManager[None]:
        """Around all that ranks do as the engine starts."""
        return nullcontext() if self.ranks is None else self.ranks.together()

    def open(self, choice: registry.Choice, deployment: Deployment) -> ModelRunner:
        """The runner of this process's rank, in a session. Raises as ``open_session`` does."""
        name, capabilities = choice.backend.name, choice.capabilities
        if self.ranks is None:
            self._session = registry.open_session(choice.plugin, deployment)
            return ModelRunner(self._session, name, deployment, capabilities)
        from ml4core.engine.ranks import group
        from ml4core.engine.ranks.runner import FirstRunner

        check_fingerprints(deployment, self.ranks.ask("prepare"))
        self.ranks.join()

        def own() -> ModelRunner:
            assert self.ranks is not None
            self._session = registry.open_session(choice.plugin, deployment)
            return FirstRunner(self._session, name, deployment, capabilities, self.ranks)

        runner, _ = self.ranks.alongside("open", own)
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
        ranks = self.ranks
        if ranks is None:
            files.load(runner, deployment, progress)
            return

        def told(done: int, total: int) -> None:
            ranks.check()  # a rank that failed is not to be found out at the end
            if progress is not None:
                progress(done, total)

        ranks.alongside("load", lambda: files.load(runner, deployment, told))

    def close(self) -> None:
        """All of it; but for a session within which a step never ended: its thread may use it for
        as long as the process lives.
        """
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
