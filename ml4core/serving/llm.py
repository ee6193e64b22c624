"""The Python API: prompts in, answers out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from types import TracebackType

from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.base import OpenedModel
from ml4core.serving.batch_run import run_jobs
from ml4core.serving.errors import EngineClosedError
from ml4core.serving.inputs import (
    Messages,
    Prompt,
    PromptInput,
    list_chats,
    list_prompts,
    make_jobs,
)
from ml4core.serving.opening import Opened
from ml4core.serving.outputs import RequestOutput
from ml4core.serving.progress import request_bar


class LLM(OpenedModel):
    """A model that answers lists of prompts.

    Calls from several threads run one after the other. Close it, or use it in a ``with`` block.
    """

    def _start(self, opened: Opened) -> None:
        super()._start(opened)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """An output for each prompt, in order. All prompts are checked before the first step.

        Args:
            prompts: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of
                those.
            sampling_params: for all, or a list of one for each; None is ``SamplingParams()``.
            use_tqdm: show a bar, where stderr is a terminal.
            priority: lower is sooner; needs ``scheduling_policy="priority"``.

        Raises ``RequestError`` for what can't be served, ``FaultError`` once the engine has
        stopped, ``EngineClosedError`` after ``close``.
        """
        return self._run(
            list_prompts(prompts, self._tokenizer), sampling_params, use_tqdm, priority
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The next message of a chat, or of each of a list of chats; else as ``generate``."""
        return self._run(list_chats(messages, self._tokenizer), sampling_params, use_tqdm, priority)

    def _run(
        self,
        prompts: Sequence[tuple[str, Prompt]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        bar: bool,
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        jobs = make_jobs(prompts, params, priority, self.args)
        with self._lock:
            if self._closed:
                raise EngineClosedError("LLM")
            with request_bar(len(jobs), bar) as ended:
                return run_jobs(
                    self.engine,
                    self._tokenizer,
                    jobs,
                    self._numbers,
                    on_done=lambda place, output: ended(),
                )

    def close(self) -> None:
        """Gives back what the engine holds. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
