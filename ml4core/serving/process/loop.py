"""The loop of an engine's process: read what was asked, step, tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ml4core.api import Fault
from ml4core.engine.core import EngineCore
from ml4core.engine.errors import RequestError
from ml4core.models.errors import shown
from ml4core.serving.process.channel import Channel
from ml4core.serving.process.wire import Abort, Add, Made, Rejected, Stop, Stopped, packed

STATS_SECONDS = 0.25
"""Time between two tellings of the engine's state while it runs."""


class EngineLoop:
    """Runs a core for whoever is at the other end of a channel."""

    def __init__(
        self, core: EngineCore, channel: Channel, look: Callable[[], Fault | None] | None = None
    ) -> None:
        """``look``: what may stop the core while nothing runs; asked when an alarm rings."""
        self._look = look
        self._core = core
        self._channel = channel
        self._queued: dict[int, float] = {}  # request -> when it came, until it takes a row
        self._told = 0.0
        self._steps = 0

    def run(self) -> Fault | None:
        """Until it is told to stop, or a fault. Raises ``ChannelClosedError`` if nobody listens."""
        core, channel = self._core, self._channel
        while True:
            for message in channel.receive(wait=not core.has_work):
                if isinstance(message, Stop):
                    return None
                self._obey(message)
            if not core.has_work:
                if self._look is not None and (fault := self._look()) is not None:
                    channel.put(Stopped(fault.code, str(fault.message)))
                    return fault
                continue
            began = time.monotonic()
            outputs = core.step()
            self._steps += 1
            if core.fault is not None:  # no token of the step that failed leaves
                fault = core.fault
                channel.put(Stopped(fault.code, str(fault.message)))
                return fault
            self._tell([packed(output) for output in outputs], began)

    def _obey(self, message: Any) -> None:
        core = self._core
        if isinstance(message, Abort):
            self._queued.pop(message.id, None)
            core.abort(str(message.id), message.answer)
            return
        assert isinstance(message, Add)
        try:
            core.add_request(
                str(message.id),
                message.prompt_ids,
                message.params,
                priority=message.priority,
                cache_salt=message.cache_salt,
                images=message.images,
            )
        except RequestError as error:
            value = error.value if isinstance(error.value, str) else shown(error.value)
            self._channel.put(Rejected(message.id, error.field, value, error.remedy))
            return
        except Exception as error:  # it concerns this request alone: nothing of it was taken
            self._channel.put(Rejected(message.id, "", f"{type(error).__name__}: {error}", ""))
            return
        self._queued[message.id] = time.monotonic()

    def _tell(self, outputs: list[tuple[Any, ...]], began: float) -> None:
        """``began``: when the step did, which took the requests that no longer wait."""
        core, now = self._core, time.monotonic()
        started = self._started(began)
        stats = None
        if now - self._told >= STATS_SECONDS or not core.has_work:
            stats, self._told = core.stats(), now
        if outputs or started or stats is not None:
            self._channel.put(Made(outputs, started, stats, self._steps))
        else:
            self._channel.flush()

    def _started(self, began: float) -> list[tuple[int, float]]:
        if not self._queued:
            return []
        waiting = {int(request.id) for request in self._core.scheduler.waiting}
        begun = [number for number in self._queued if number not in waiting]
        return [(number, began - self._queued.pop(number)) for number in begun]
