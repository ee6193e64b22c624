"""Where a request's handler waits for what the engine makes."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ml4core.engine.outputs import SequenceOutput


class EngineGoneError(RuntimeError):
    """The engine serves no more; the text says why."""


class News(NamedTuple):
    """``place``: of the prompt in the request. ``at``: when it came, on the monotonic clock."""

    place: int
    output: SequenceOutput
    at: float


class Inbox:
    """What came for one HTTP request, which may have several prompts. Of one event loop.

    A reader that lags finds more at once. It holds at most the answers' tokens.
    """

    def __init__(self) -> None:
        self._news: list[News] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[News]:
        """All that came since, at least one. Raises what ended the request; what came before is
        given first.
        """
        while not self._news:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        return news

    def put(self, news: News) -> None:
        self._news.append(news)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
