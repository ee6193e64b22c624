"""The Python API: prompts in, answers out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ml4core.engine.args import EngineArgs
from ml4core.engine.sampling_params import SamplingParams
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
from ml4core.serving.opening import Opened, make_args, open_for_any
from ml4core.serving.outputs import RequestOutput
from ml4core.serving.progress import request_bar
from ml4core.serving.tokenizer import Tokenizer


class LLM:
    """A model that answers lists of prompts.

    Calls from several threads run one after the other. Close it, or use it in a ``with`` block.
    """

    def __init__(self, model: str, backend: str = "cpu", **flags: Any) -> None:
        """Opens a model.

        Args:
            model: a folder, or a hub id ``org/name``.
            backend: what runs it; ``auto`` for the best that opens.
            flags: fields of ``EngineArgs``, which are the flags of the command line.

        Raises:
            TypeError: a flag that isn't one.
            ArgumentsError: flags with bad values, every fault at once.
            Refused: with all reasons, before anything is allocated.
            CheckpointError: the checkpoint or the tokenizer can't be used.
            RequestError: a flag's value can't be, with this model.
        """
        self._start(open_for_any(make_args(model, backend, flags)))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """Raises as the constructor does."""
        made = cls.__new__(cls)
        made._start(open_for_any(args))
        return made

    def _start(self, opened: Opened) -> None:
        self.args = opened.args
        self.engine = opened.engine
        self._tokenizer = opened.tokenizer
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

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def report(self) -> dict[str, Any]:
        """What runs where, and why not elsewhere, as JSON-able data."""
        return self.engine.report()

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
