"""The Python API for asyncio: requests come and go while the engine runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.answers import Answers
from ml4core.serving.base import OpenedModel
from ml4core.serving.engine_thread import EngineThread, Waiter
from ml4core.serving.inputs import Job, PromptInput, check_params, check_priority, read_prompt
from ml4core.serving.opening import Opened
from ml4core.serving.outputs import RequestOutput


class AsyncLLM(OpenedModel):
    """A model that answers requests as they come.

    Methods may be called from any event loop, of any thread. Shut it down, or use it in an
    ``async with`` block.
    """

    _serves = True

    def _start(self, opened: Opened) -> None:
        super()._start(opened)
        self._thread = EngineThread(opened.engine)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request, each with all that was made up to then; the last is ``finished``.

        A consumer that is slower than the engine misses outputs, never text. If the iterator is
        cancelled or closed the request ends, and its pages are given back.

        Args:
            prompt: a text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            request_id: one that no open request has.
            priority: lower is sooner; needs ``scheduling_policy="priority"``.

        Raises ``RequestError`` for what can't be served, ``FaultError`` once the engine has
        stopped, ``EngineClosedError`` after ``shutdown``.
        """
        self._thread.check()
        check_params(sampling_params)
        check_priority(priority, self.args)
        # Off the loop: a long text takes a while to divide.
        read = await asyncio.to_thread(read_prompt, prompt, self._tokenizer, "prompt")
        if sampling_params.structured_outputs is not None:
            # Compiled here, and kept: the thread of the engine has others to serve.
            await asyncio.to_thread(self._grammars.check, sampling_params.structured_outputs)
        answers = Answers(request_id, read, sampling_params, self._tokenizer)
        job = Job("prompt", read, sampling_params, priority)
        waiter = Waiter(asyncio.get_running_loop(), job, answers)
        self._thread.submit(waiter)
        try:
            while True:
                output = await waiter.next()
                yield output
                if output.finished:
                    return
        finally:
            self._thread.drop(waiter)

    async def abort(self, request_id: str) -> None:
        """Ends a request: its last output says ``abort``. Does nothing for what isn't open."""
        self._thread.abort(request_id)

    @property
    def errored(self) -> bool:
        """Whether it takes no more requests: the engine has stopped, or was shut down."""
        return self._thread.ended

    async def check_health(self) -> None:
        """Raises what a new request would."""
        self._thread.check()

    def shutdown(self) -> None:
        """Waits for the step that runs, and gives back what the engine holds. Open requests raise
        ``EngineClosedError``. A second call does nothing.
        """
        self._thread.close()

    close = shutdown

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)
