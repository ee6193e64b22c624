"""The thread that an engine runs in, and those who wait for it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ml4core.api import FaultError
from ml4core.engine.errors import RequestError
from ml4core.serving.answers import Answers
from ml4core.serving.errors import EngineClosedError
from ml4core.serving.inputs import Job
from ml4core.serving.outputs import RequestOutput

if TYPE_CHECKING:
    from ml4core.engine.llm import Engine


class Waiter:
    """A request, and the end of it that is in an event loop.

    Attributes:
        name: what the core calls it, set by the thread. Never used twice, so what the core still
            tells of a request that was dropped can't be taken for one of the same id.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, job: Job, answers: Answers) -> None:
        self.loop = loop
        self.job = job
        self.answers = answers
        self.name = ""
        self._changed = asyncio.Event()
        self._latest: RequestOutput | Exception | None = None

    async def next(self) -> RequestOutput:
        """The latest output that was not given yet. Raises what ended the request."""
        await self._changed.wait()
        self._changed.clear()
        latest = self._latest
        assert latest is not None
        if isinstance(latest, Exception):
            raise latest
        return latest

    def put(self, latest: RequestOutput | Exception) -> None:
        """To be called in the loop. Outputs hold all up to now, so one may replace another."""
        self._latest = latest
        self._changed.set()


Delivery = tuple[Waiter, RequestOutput | Exception]


class EngineThread:
    """Runs an engine's core. Only this thread calls it; others leave commands."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._numbers = itertools.count()
        self._requests: dict[str, Waiter] = {}
        self._names: dict[str, str] = {}  # request id -> what the core calls it
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._end: Callable[[], Exception] | None = None  # makes what callers get from then on
        self._close_lock = threading.Lock()
        self._engine_closed = False
        engine.watch(self._nudge)
        # A process that forgets to close must still be able to exit.
        self._thread = threading.Thread(target=self._serve, name="ml4core-engine", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._end is not None or self._closing

    def check(self) -> None:
        """Raises if no more requests are taken."""
        if self._end is not None:
            raise self._end()
        if self._closing:
            raise EngineClosedError()

    def submit(self, waiter: Waiter) -> None:
        """Errors of the request itself reach its waiter. Raises as ``check``."""
        with self._wake:
            self.check()
            self._commands.append(partial(self._add, waiter))
            self._wake.notify()

    def drop(self, waiter: Waiter) -> None:
        """Ends a request that nobody waits for any more."""
        self._command(partial(self._drop, waiter))

    def abort(self, request_id: str) -> None:
        """Ends a request that somebody may wait for."""
        self._command(partial(self._abort, request_id))

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        with self._close_lock:
            if not self._engine_closed:
                self._engine_closed = True
                self._engine.close()

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self.ended:
                self._commands.append(command)
                self._wake.notify()

    def _nudge(self) -> None:
        """Others want to step, or to stop."""
        with self._wake:
            self._wake.notify()

    # What follows runs in the thread.

    def _serve(self) -> None:
        try:
            while self._obey():
                if self._core.has_work:
                    self._step()
            self._stop(EngineClosedError)
        except FaultError as error:
            fault, cause = error.fault, error.__cause__
            self._stop(lambda: _caused(FaultError(fault), cause))
            self._engine.tell_fault()
        except Exception as error:  # a fault of this program must not leave anyone waiting
            text, cause = f"the engine's thread failed: {type(error).__name__}: {error}", error
            self._stop(lambda: _caused(RuntimeError(text), cause))

    def _obey(self) -> bool:
        """Waits for something to do, and does what was asked; False once it is to end."""
        with self._wake:
            while not (self._closing or self._commands or self._core.has_work):
                self._wake.wait()
            if self._closing:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return True

    def _add(self, waiter: Waiter) -> None:
        job, request_id = waiter.job, waiter.answers.request_id
        try:
            self.check()
            if request_id in self._names:
                works = "an id that no open request has"
                raise RequestError("request_id", request_id, works)
            name = str(next(self._numbers))
            self._core.add_request(
                name,
                job.prompt.token_ids,
                job.params,
                priority=job.priority,
                cache_salt=job.prompt.cache_salt,
            )
        except Exception as error:  # it concerns this request alone: nothing of it was taken
            self._deliver([(waiter, error)])
            return
        waiter.name = name
        self._names[request_id] = name
        self._requests[name] = waiter

    def _drop(self, waiter: Waiter) -> None:
        if self._requests.get(waiter.name) is waiter:
            self._forget(waiter)
            self._core.abort(waiter.name)

    def _abort(self, request_id: str) -> None:
        if request_id in self._names:
            self._core.abort(self._names[request_id])  # the next step tells its waiter

    def _forget(self, waiter: Waiter) -> None:
        del self._requests[waiter.name]
        del self._names[waiter.answers.request_id]

    def _step(self) -> None:
        core = self._core
        outputs = core.step()
        if core.fault is not None:  # no token of the step that failed leaves
            raise _caused(FaultError(core.fault), core.cause)
        touched: dict[str, Waiter] = {}
        failed: list[Delivery] = []
        for output in outputs:
            waiter = self._requests.get(output.request_id)
            if waiter is None:  # dropped, or ended by its text
                continue
            try:
                if waiter.answers.take(output).stopped:
                    core.abort(output.request_id, output.index)
            except Exception as error:  # in the text of one request: the others go on
                self._drop(waiter)
                touched.pop(waiter.name, None)
                failed.append((waiter, error))
                continue
            touched[waiter.name] = waiter
            if waiter.answers.finished:
                self._forget(waiter)
        self._deliver([(w, w.answers.output()) for w in touched.values()] + failed)

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        """One call into each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
        for waiter, item in deliveries:
            by_loop.setdefault(waiter.loop, []).append((waiter, item))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, items)
            except RuntimeError:  # the loop was closed over its requests
                for waiter, _ in items:
                    self._drop(waiter)

    def _stop(self, make_error: Callable[[], Exception]) -> None:
        """Tells everybody who waits; from then on callers are told at once."""
        with self._wake:
            self._end = make_error
            commands, self._commands = self._commands, deque()
        waiters = list(self._requests.values())
        for waiter in waiters:
            self._drop(waiter)
        self._deliver([(waiter, make_error()) for waiter in waiters])
        for command in commands:  # what came meanwhile
            command()


def _put(items: list[Delivery]) -> None:
    for waiter, item in items:
        waiter.put(item)


def _caused(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error
