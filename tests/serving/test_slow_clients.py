"""Clients that send or read too slowly, and clients that are too many."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from ml4core.serving.http.connections import BODY_RATE, Connection, Limits

TEXT = "/v1/completions"
CONNECTIONS = 6
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(start: Callable[..., Any]) -> Iterator[Any]:
    server = start(
        *("--null-step-ms", "1", "--max-model-len", "8192", "--max-num-seqs", "8"),
        *("--header-timeout-s", "2", "--body-timeout-s", "2", "--slow-reader-timeout-s", "2"),
        *("--limit-concurrency", str(CONNECTIONS), "--h11-max-incomplete-event-size", "4K"),
    )
    yield server
    server.kill()


def connect(server: Any, **options: int) -> socket.socket:
    parts = urlsplit(server.url)
    made = socket.socket()
    for name, value in options.items():
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    made.settimeout(60)
    made.connect((parts.hostname, parts.port))
    return made


def rest(sock: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def drip(sock: socket.socket, piece: bytes) -> threading.Thread:
    """Sends a piece again and again, until that fails."""

    def run() -> None:
        try:
            while True:
                sock.sendall(piece)
                time.sleep(0.1)
        except OSError:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def refusal(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


DRIPS = (
    (HEAD, b"x-more: 1\r\n", "--header-timeout-s"),
    (HEAD[:20], b"", "--header-timeout-s"),
    (HEAD + b"content-length: 100000\r\n\r\n", b" ", "--body-timeout-s"),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", "--body-timeout-s"),
)
"""What a request begins with, what is sent again and again behind it, and the flag that ends it."""


@pytest.mark.multiprocess
def test_who_drips_a_request_is_cut_off(strict: Any, until: Any) -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(connect(strict))
        socks = [stack.enter_context(connect(strict)) for _ in DRIPS]
        for sock, (beginning, piece, _) in zip(socks, DRIPS, strict=True):
            sock.sendall(beginning)
            drip(sock, piece)
        assert strict.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200
        for sock, (_, _, flag) in zip(socks, DRIPS, strict=True):
            status, error = refusal(rest(sock))
            assert (status, error["code"]) == (408, "request_timeout")
            assert flag in error["message"]
        assert rest(silent) == b"", "who says nothing is told nothing"
    until(lambda: strict.metric("ml4_open_requests") == 0)
    assert strict.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.multiprocess
def test_headers_have_an_end(strict: Any) -> None:
    with connect(strict) as sock:
        sock.sendall(HEAD + b"x-long: ")
        drip(sock, b"x" * 1000)
        raw = rest(sock)
    if raw:  # else what was still sent has taken the answer away
        status, error = refusal(raw)
        assert status == 431
        assert "4,096" in error["message"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9\r\n"]
)
def test_what_is_no_http_is_told(strict: Any, raw: bytes) -> None:
    with connect(strict) as sock:
        sock.sendall(raw)
        status, error = refusal(rest(sock))
    assert (status, error["code"]) == (400, "bad_request")


@pytest.mark.multiprocess
def test_one_connection_too_many(strict: Any, until: Any) -> None:
    """Those that are at rest make room; those that are answered don't."""
    body = json.dumps({"prompt": [5], "max_tokens": 8000, "ignore_eos": True, "stream": True})
    raw = HEAD + f"content-length: {len(body)}\r\n\r\n{body}".encode()
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(strict)) for _ in range(CONNECTIONS - 1)]
        until(lambda: strict.get("/health").status_code == 200)  # a sixth
        busy = []
        for _ in range(CONNECTIONS):
            sock = stack.enter_context(connect(strict))
            sock.sendall(raw)
            assert b"200 OK" in sock.recv(4096)
            busy.append(sock)
        for sock in idle:
            assert rest(sock) == b""
        late = stack.enter_context(connect(strict))
        late.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        found = rest(late)
        if found:  # else the answer was lost with the connection, which is closed either way
            status, error = refusal(found)
            assert (status, error["code"]) == (503, "too_many_connections")
            assert "--limit-concurrency" in error["message"]
        for sock in busy:
            assert sock.recv(100), "those that are answered go on"
    until(lambda: strict.get("/health").status_code == 200)


@pytest.mark.multiprocess
def test_who_reads_nothing_is_dropped(strict: Any, until: Any) -> None:
    """Whoever holds its answer, the server or the system, does not hold it for ever."""
    fields = {"echo": True, "logprobs": 1, "return_token_ids": True, "prompt_logprobs": 1}
    body = json.dumps({"prompt": [[300] * 4000] * 2, "max_tokens": 1} | fields).encode()

    def files() -> float:
        return float(strict.metric("process_open_fds"))

    with connect(strict, SO_RCVBUF=4096) as sock:
        before = until(lambda: (found := files()) and files() == found and found)
        sock.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        until(lambda: files() < before)
        assert len(rest(sock)) < 100_000, "what the client's own system had taken"
    assert strict.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_limit_beyond_that_of_files_is_told(ml4_here: Callable[..., Any]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard > 2**30:
        pytest.skip("no limit of files")
    code, told = ml4_here("--null-step-ms", "0", "--limit-concurrency", str(hard + 1))
    assert code == 2
    assert "--limit-concurrency" in told
    assert f"up to {hard - 128}" in told


def test_as_many_connections_as_files_allow() -> None:
    """In a process of its own: a limit that was raised stays so."""
    code = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 1024)));"
        "from ml4core.serving.http.connections import connection_limit;"
        "print(connection_limit(None), connection_limit(10))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["896", "10"]


class _Transport:
    """``ended``: how it was closed; None while it is open."""

    def __init__(self) -> None:
        self.ended: str | None = None
        self.written = b""
        self.unsent = 0

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.ended is not None

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Bench:
    """A connection by hand, with a clock of its own. The application never answers."""

    def __init__(self) -> None:
        import uvicorn
        from uvicorn.server import ServerState

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.Event().wait()

        self.now = 0.0
        loop: Any = SimpleNamespace(
            time=lambda: self.now, create_task=asyncio.get_running_loop().create_task
        )
        limits = Limits(10, 10, 10, 4096, 4)
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        self.state = ServerState()
        self.made = Connection(config, self.state, {}, loop, limits=limits)
        self.transport = _Transport()
        transport: Any = self.transport
        self.made.connection_made(transport)
        self.started: list[Any] = []  # of requests, those that the application has
        start = self.made._start_asgi_task

        def started(cycle: Any, app: Any) -> None:
            self.started.append(cycle)
            start(cycle, app)

        self.made._start_asgi_task = started  # type: ignore[method-assign]

    def check(self, at: float, late: float = 0.0) -> str | None:
        self.now = at
        self.made.check(at, late)
        ended: str | None = self.transport.ended
        return ended


def alone(body: Callable[[_Bench], None]) -> None:
    async def run() -> None:
        body(_Bench())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(run())


def test_a_large_body_has_time_by_its_bytes() -> None:
    def body(bench: _Bench) -> None:
        bench.made.data_received(HEAD + b"content-length: 10000000\r\n\r\n")
        for second in range(1, 60):
            bench.made.data_received(b" " * BODY_RATE)
            bench.made.flow.resume_reading()  # what the application does
            assert bench.check(second) is None
        assert bench.check(68) is None
        assert bench.check(80) == "closed"
        assert bench.transport.written.startswith(b"HTTP/1.1 408 ")

    alone(body)


def test_time_of_the_server_is_no_time_of_the_client() -> None:
    def body(bench: _Bench) -> None:
        bench.made.data_received(HEAD)
        assert bench.check(9) is None
        assert bench.check(30, late=20) is None, "held up"
        assert bench.check(32) == "closed"

    alone(body)


def test_a_body_that_is_not_read_has_all_time() -> None:
    def body(bench: _Bench) -> None:
        bench.made.data_received(HEAD + b"content-length: 100000\r\n\r\n" + b" " * 70_000)
        assert bench.made.flow.read_paused
        assert bench.check(100) is None
        bench.made.flow.resume_reading()
        assert bench.check(105) is None
        assert bench.check(130) == "closed"

    alone(body)


def test_an_answer_has_no_limit_but_its_reader_has() -> None:
    def body(bench: _Bench) -> None:
        bench.made.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert bench.check(1000) is None
        bench.transport.unsent = 500
        assert bench.check(1001) is None
        bench.transport.unsent = 499
        assert bench.check(1012) is None, "a byte was taken"
        assert bench.check(1021) is None
        assert bench.check(1023) == "aborted"

    alone(body)


def test_between_requests_it_is_the_keep_alive_time_that_counts() -> None:
    def body(bench: _Bench) -> None:
        bench.made.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not bench.made.at_rest
        bench.made.cycle.response_started = bench.made.cycle.response_complete = True
        bench.made.loop = asyncio.get_running_loop()
        bench.made.on_response_complete()
        bench.made._unset_keepalive_if_required()
        assert bench.made.at_rest
        assert bench.check(1000) is None
        bench.made.loop = SimpleNamespace(time=lambda: bench.now)  # type: ignore[assignment]
        bench.made.data_received(b"GET ")
        assert bench.check(1005) is None
        assert bench.check(1011) == "closed"
        assert bench.transport.written.startswith(b"HTTP/1.1 408 ")

    alone(body)


def test_headers_have_an_end_however_they_come() -> None:
    """In one piece, as lines, and behind a body."""
    line = b"x-more: " + b"x" * 100 + b"\r\n"
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n \r\n0\r\n"
    for pieces in (
        [HEAD + b"x-long: " + b"x" * 5000 + b"\r\n\r\n"],
        [b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n"],
        [HEAD + line * 50 + b"\r\n"],
        [HEAD, *[line] * 50],
        [HEAD + b"x-long: " + b"x" * 5000],
        [chunked, *[line] * 50],
    ):

        def body(bench: _Bench, pieces: list[bytes] = pieces) -> None:
            for piece in pieces:
                bench.made.data_received(piece)
            assert bench.transport.ended == "closed"
            assert bench.transport.written.startswith(b"HTTP/1.1 431 ")
            assert bench.transport.written.count(b"HTTP/1.1") == 1

        alone(body)


def test_a_pipelined_request_waits_for_the_answer_before_it() -> None:
    first = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    for second in (b"GET ", HEAD + b"content-length: 10\r\n\r\n"):

        def body(bench: _Bench, second: bytes = second) -> None:
            bench.made.data_received(first + second)
            bench.made.flow.resume_reading()  # what the first one's application does
            assert bench.check(1000) is None
            assert not bench.transport.written

        alone(body)


def test_what_was_answered_is_not_answered_again() -> None:
    """An answer that came before the body's end is the only one."""

    def body(bench: _Bench) -> None:
        bench.made.data_received(HEAD + b"content-length: 10\r\n\r\n")
        bench.made.cycle.response_started = bench.made.cycle.response_complete = True
        assert bench.check(11) == "closed"
        assert not bench.transport.written

    alone(body)


def test_empty_lines_are_no_request_and_have_an_end() -> None:
    def body(bench: _Bench) -> None:
        bench.made.data_received(b"\r\n")
        assert bench.made.at_rest
        assert bench.check(9) is None
        bench.made.data_received(b"\r\n")
        assert bench.check(11) == "closed"

    alone(body)


def test_what_is_unsent_makes_no_room() -> None:
    def body(bench: _Bench) -> None:
        assert bench.made.at_rest
        bench.transport.unsent = 1
        assert not bench.made.at_rest

    alone(body)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_who_asks_for_another_protocol_is_answered_in_this_one(size: int) -> None:
    """With its body, and with what comes behind it; however it is cut into pieces."""
    wish = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    raw = HEAD + wish + b"content-length: 5\r\n\r\nhelloGET /next HTTP/1.1\r\nhost: x\r\n\r\n"

    def body(bench: _Bench) -> None:
        for i in range(0, len(raw), size):
            bench.made.data_received(raw[i : i + size])
        (first,), ((later, _),) = bench.started, bench.made.pipeline
        assert (first.scope["path"], later.scope["path"]) == (TEXT, "/next")
        assert bytes(first.body) == b"hello"
        assert not first.more_body
        assert dict(first.scope["headers"])[b"http2-settings"] == b"AA"
        assert bench.transport.ended is None

    alone(body)


@pytest.mark.parametrize(
    "raw", [b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nupgrade: x\r\n\r\n"]
)
def test_no_tunnels(raw: bytes) -> None:
    def body(bench: _Bench) -> None:
        bench.made.data_received(raw)
        assert bench.transport.written.startswith(b"HTTP/1.1 400 ")

    alone(body)


def test_many_wishes_at_once() -> None:
    raw = b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 3000

    def body(bench: _Bench) -> None:
        bench.made.data_received(raw)
        assert len(bench.made.pipeline) == 2999
        assert bench.transport.ended is None

    alone(body)
