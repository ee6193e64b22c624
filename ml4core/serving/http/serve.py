"""Runs a server: its socket, its engine, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn

from ml4core import __version__
from ml4core.api import Fault, FaultError
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.serving.http import logs
from ml4core.serving.http.app import build_app
from ml4core.serving.http.connections import Connection, Limits, connection_limit, watch
from ml4core.serving.http.flags import KEYS_VARIABLE, ServerArgs, without_server_flags
from ml4core.serving.http.packages import need_tracing
from ml4core.serving.http.service import WARM_UP_SECONDS, Service
from ml4core.serving.http.tracing import Tracer
from ml4core.serving.process.inbox import EngineGoneError
from ml4core.serving.process.link import EngineLink
from ml4core.serving.process.memory import settle
from ml4core.serving.process.opening import open_model

LINGER_SECONDS = 3.0
"""How long a server whose engine has ended still says so."""
WRITE_SECONDS = 5.0
"""For the last bytes of answers at the end."""
BACKLOG = 2048


class ShutdownError(RuntimeError):
    """Requests were cut off at the end."""


def run(args: EngineArgs, server: ServerArgs) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises what opening the engine raises, before the port is open; ``FaultError`` once the engine
    has ended by itself; ``ShutdownError`` if the grace time did not suffice.
    """
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
    server = replace(server, api_key=(*server.api_key, *(key for key in keys if key)))
    limits = _check(server)
    log = logs.set_up(server.log_format)
    with (
        contextlib.closing(bind(server.host, server.port, server.slow_reader_timeout_s)) as sock,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        runner.run(_Run(args, server, sock, log, limits).run())


def _check(server: ServerArgs) -> Limits:
    """What would else be found once the model is there; the limits of connections. Raises
    ``ArgumentsError`` or ``MissingPackageError``.
    """
    if server.otlp_traces_endpoint is not None:
        need_tracing()
    if server.ssl_certfile is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile)
        except OSError as error:  # ssl's own errors are such
            raise ArgumentsError(
                [f"--ssl-certfile: {server.ssl_certfile} with its key: {error}"]
            ) from error
    try:
        connections = connection_limit(server.limit_concurrency)
    except ValueError as error:
        raise ArgumentsError([f"--limit-concurrency: {error}"]) from error
    return Limits(
        head_seconds=server.header_timeout_s,
        body_seconds=server.body_timeout_s,
        reader_seconds=server.slow_reader_timeout_s,
        head_bytes=server.h11_max_incomplete_event_size,
        connections=connections,
    )


def bind(host: str, port: int, reader_seconds: float) -> socket.socket:
    """A socket that does not listen yet. Raises ``OSError`` that names the address.

    ``reader_seconds``: after which the system ends a connection whose other end takes nothing.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; what is accepted inherits it
            milliseconds = int(reader_seconds * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        sock.bind(address)
    except OSError as error:
        reason = f"can't listen: {error.strerror or error}"
        raise OSError(error.errno, reason, f"{host}:{port}") from error
    return sock


class _Run:
    def __init__(
        self,
        args: EngineArgs,
        server: ServerArgs,
        sock: socket.socket,
        log: logging.Logger,
        limits: Limits,
    ) -> None:
        self._args = args
        self._server = server
        self._limits = limits
        self._socket = sock
        self._log = log
        self._stop = asyncio.Event()
        self._cut = 0

    async def run(self) -> None:
        with self._signals():
            link = await EngineLink.start(self._opener())
            try:
                service = await self._open(link)
                if service is not None:
                    await self._serve(link, service)
            finally:
                await link.close()

    def _opener(self) -> Callable[[], Any]:
        args = without_server_flags(self._args)
        if self._server.null_step_ms is None:
            return partial(open_model, args)
        from ml4core.serving.process.null_engine import open_null

        return partial(open_null, args, self._server.null_step_ms / 1000)

    async def _open(self, link: EngineLink) -> Service | None:
        """The service, once a step has run; None if a signal came before."""
        stop = asyncio.create_task(self._stop.wait())
        opening = asyncio.create_task(self._warm(link))
        await asyncio.wait([stop, opening], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not opening.done():
            opening.cancel()
            return None
        return opening.result()

    async def _warm(self, link: EngineLink) -> Service:
        facts = await link.facts()
        service = Service(link, facts, self._args, self._server)
        try:
            await service.probe(WARM_UP_SECONDS)
        except EngineGoneError as error:
            raise _fault(error) from error
        return service

    async def _serve(self, link: EngineLink, service: Service) -> None:
        server, endpoint = self._server, self._server.otlp_traces_endpoint
        tracer = None if endpoint is None else Tracer(endpoint, service.names[0])
        config = uvicorn.Config(
            build_app(service, tracer),
            http=cast(Any, partial(Connection, limits=self._limits)),  # it calls it, no more
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=BACKLOG,
            ssl_certfile=server.ssl_certfile,
            ssl_keyfile=server.ssl_keyfile,
            timeout_graceful_shutdown=int(WRITE_SECONDS),
            timeout_keep_alive=server.timeout_keep_alive,
        )
        http = _Http(config)
        serving = asyncio.create_task(http.serve([self._socket]))
        watching = asyncio.create_task(watch(http.server_state.connections, self._limits))
        settle()
        try:
            await self._announce(http, service)
            await self._until_end(link, service, serving)
        finally:
            http.should_exit = True
            await serving
            watching.cancel()
            service.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
        if link.ended is not None and not self._stop.is_set():
            raise _fault(EngineGoneError(link.ended))
        if self._cut:
            raise ShutdownError(
                f"{self._cut} requests were cut off after {server.shutdown_grace_s:g} s: "
                "--shutdown-grace-s"
            )

    async def _announce(self, http: _Http, service: Service) -> None:
        while not http.started and not http.should_exit:
            await asyncio.sleep(0.01)
        host, port = self._socket.getsockname()[:2]
        scheme = "https" if self._server.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        self._log.info(
            "serving",
            extra={
                "fields": {
                    "model": service.names[0],
                    "url": f"{scheme}://{shown}:{port}",
                    "backend": service.facts.report["backend"]["name"],
                    "max_model_len": service.facts.max_model_len,
                    "max_num_seqs": service.facts.max_num_seqs,
                    "version": __version__,
                    "engine_pid": service.link.pid,
                    **_start(service.facts.report),
                }
            },
        )

    async def _until_end(
        self, link: EngineLink, service: Service, serving: asyncio.Task[None]
    ) -> None:
        stop = asyncio.create_task(self._stop.wait())
        gone = asyncio.create_task(link.gone())
        try:
            await asyncio.wait([stop, gone, serving], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self._log.error("engine ended", extra={"fields": {"reason": link.ended}})
                await asyncio.sleep(LINGER_SECONDS)  # who asks is told why
            elif stop.done():
                await self._drain(service)
        finally:
            stop.cancel()
            gone.cancel()

    async def _drain(self, service: Service) -> None:
        """Takes no more requests, and waits for those that are open."""
        grace = self._server.shutdown_grace_s
        service.draining = "the server is shutting down"
        fields = {"open": len(service.exchanges), "grace_s": grace}
        self._log.info("draining", extra={"fields": fields})
        self._stop.clear()
        end = time.monotonic() + grace
        while service.exchanges and time.monotonic() < end and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.05)
        self._stop.set()
        self._cut = len(service.exchanges)
        for exchange in list(service.exchanges):
            exchange.fail(EngineGoneError("the server is shutting down"))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self._stop.set)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])


class _Http(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _start(report: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine tells of its start, where it tells of it."""
    spent = report.get("start_up")
    if spent is None:
        return {}
    names = ("warm_up_s", "profile_s", "capture_s", "captures")
    memory = {"memory_off_percent": report["memory"]["in_all"]["off_percent"]}
    return {name: round(spent[name], 1) for name in names} | memory


def _fault(error: EngineGoneError) -> FaultError:
    return FaultError(Fault("engine", str(error), 0))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loops, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
