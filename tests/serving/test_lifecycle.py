"""How a server starts, drains, and what it does once its engine is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.multiprocess

TEXT = "/v1/completions"
NULL = ("--max-model-len", "4096", "--max-num-seqs", "4")


class Stream:
    """A completion that is read in a thread."""

    def __init__(self, server: Any, tokens: int, **options: Any) -> None:
        self.body = {"prompt": [5], "max_tokens": tokens, "ignore_eos": True} | options
        self.events: list[Any] = []
        self.status = 0
        self.error: Exception | None = None
        self.ended = 0.0
        self.begun = threading.Event()
        self._server = server
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self.begun.wait(60)

    def _run(self) -> None:
        try:
            with (
                self._server.http() as client,
                client.stream("POST", TEXT, json=self.body | {"stream": True}) as answer,
            ):
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                        self.begun.set()
        except Exception as error:
            self.error = error
        finally:
            self.ended = time.monotonic()
            self.begun.set()

    @property
    def tokens(self) -> int:
        texts = [e["choices"][0]["text"] for e in self.events if "choices" in e]
        return "".join(texts).count(" and")

    def join(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def serve(start: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    made = []

    def begin(*words: str, **environment: str) -> Any:
        made.append(start(*NULL, *words, **environment))
        return made[-1]

    yield begin
    for server in made:
        server.kill()


def test_sigterm_loses_no_accepted_request(serve: Callable[..., Any], alive: Any) -> None:
    server = serve("--null-step-ms", "10", "--shutdown-grace-s", "60")
    streams = [Stream(server, 200) for _ in range(6)]  # two of them wait for a place
    with server.http() as client:
        client.get("/health").raise_for_status()
        server.process.send_signal(signal.SIGTERM)
        server.event("draining")
        refused = client.post(TEXT, json={"prompt": "a"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
    for stream in streams:
        stream.join()
        assert (stream.error, stream.status, stream.tokens) == (None, 200, 200)
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0
    assert not alive(server.engine_pid)


def test_what_outlives_the_grace_is_cut_off_and_told(serve: Callable[..., Any]) -> None:
    server = serve("--null-step-ms", "20", "--shutdown-grace-s", "0.5")
    stream = Stream(server, 4000)
    assert server.stop() == 1
    stream.join()
    assert "shutting down" in stream.events[-1]["error"]["message"]
    told = "".join(server.noise)
    assert "1 requests were cut off" in told
    assert "--shutdown-grace-s" in told
    assert "fault of ml4core" not in told, "it is the operator's grace"


@pytest.mark.alone
def test_a_killed_engine_is_told_within_seconds(serve: Callable[..., Any], until: Any) -> None:
    server = serve("--null-step-ms", "20")
    stream = Stream(server, 4000)
    whole: list[httpx.Response] = []
    body = {"prompt": [5], "max_tokens": 3000, "ignore_eos": True}
    waiting = threading.Thread(target=lambda: whole.append(server.post(TEXT, body)))
    waiting.start()
    until(lambda: server.metric("ml4_num_requests_running") == 2)
    with server.http() as client:
        client.get("/ready").raise_for_status()
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        answer = until(lambda: (r := client.get("/ready")).status_code == 503 and r)
        assert time.monotonic() - killed < 5
        assert "SIGKILL" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 503
        assert client.post(TEXT, json=body).status_code == 503
    stream.join()
    waiting.join(60)
    assert stream.ended - killed < 5
    assert "SIGKILL" in stream.events[-1]["error"]["message"]
    assert whole[0].status_code == 503
    assert "SIGKILL" in whole[0].json()["error"]["message"]
    assert server.process.wait(60) == 4


def test_a_stopped_engine_is_not_ready(serve: Callable[..., Any]) -> None:
    server = serve("--null-step-ms", "1", "--ready-timeout-s", "1")
    pid = server.engine_pid
    with server.http() as client:
        assert client.get("/ready").json() == {"status": "ready"}
        os.kill(pid, signal.SIGSTOP)
        try:
            answer = client.get("/ready")
            assert answer.status_code == 503
            assert "--ready-timeout-s" in answer.json()["error"]["message"]
            assert client.get("/health").status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        assert client.get("/ready").status_code == 200


def test_an_engine_does_not_outlive_its_server(
    serve: Callable[..., Any], alive: Any, until: Any
) -> None:
    server = serve("--null-step-ms", "1")
    pid = server.engine_pid
    os.kill(server.process.pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def test_keys(serve: Callable[..., Any]) -> None:
    server = serve("--null-step-ms", "0", "--api-key", "one", ML4_API_KEY="two, three")
    body = {"prompt": "a", "max_tokens": 1}
    with server.http() as client:
        for key, status in (("one", 200), ("three", 200), ("four", 401), (None, 401), ("ü", 401)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            answer = client.post(TEXT, json=body, headers=headers)
            assert answer.status_code == status, key
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/report", "/tokenize"):
            assert client.get(path).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert client.get(path).status_code == 200
    assert server.stop(signal.SIGINT) == 0


def test_a_full_queue_says_when_to_come_again(serve: Callable[..., Any], until: Any) -> None:
    server = serve("--null-step-ms", "20", "--max-queue", "2")
    streams = [Stream(server, 150) for _ in range(4)]
    waiting = [
        threading.Thread(target=server.post, args=(TEXT, {"prompt": [5], "max_tokens": 1}))
        for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    until(lambda: server.metric("ml4_num_requests_waiting") == 2)
    answer = server.post(TEXT, {"prompt": [5], "max_tokens": 1})
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert "--max-queue" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "queue_full"
    for thread in waiting:
        thread.join(60)
    for stream in streams:
        stream.join()
        assert stream.tokens == 150
    assert server.post(TEXT, {"prompt": [5], "max_tokens": 1}).status_code == 200


def test_a_taken_port_is_told_before_anything_is_opened(ml4: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, told = ml4("--port", port, "--null-step-ms", "0")
    assert code == 1
    assert f"127.0.0.1:{port}" in told
    assert "in use" in told


def test_a_model_that_is_not_there_opens_no_port(ml4: Callable[..., Any]) -> None:
    code, told = ml4("/no/such/folder", "--backend", "cpu")
    assert code == 1
    assert "/no/such/folder" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--port", "70000"), "--port: 70000 is out of range"),
        (("--ssl-certfile", "x"), "--ssl-keyfile"),
        (("--api-key", " "), "--api-key"),
        (("--log-format", "xml"), "text, json"),
        (("--ready-timeout-s", "0"), "--ready-timeout-s: 0.0 is out of range"),
        (("--ssl-certfile", "/no", "--ssl-keyfile", "/no"), "--ssl-certfile: /no with its key"),
    ],
)
def test_flags_are_checked(ml4_here: Callable[..., Any], words: tuple[str, ...], told: str) -> None:
    code, text = ml4_here(*words)
    assert code == 2
    assert told in text


def test_a_dry_run_plans_and_ends(ml4_here: Callable[..., Any]) -> None:
    code, text = ml4_here("--backend", "cpu", "--dry-run", "--max-model-len", "2048")
    assert code == 0
    found = json.loads(text)
    assert found["backend"]["name"] == "cpu"
    assert found["plan"]["limits"]["max_model_len"] == 2048


def test_what_is_accepted_ends_with_a_client_that_takes_nothing() -> None:
    """The system does it: a write that waits for a client holds nobody else up."""
    from ml4core.serving.http.serve import bind

    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("only Linux has it")
    with bind("127.0.0.1", 0, 1.5) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, option) == 1500


def test_a_missing_package_comes_with_its_command() -> None:
    from ml4core.serving.http.packages import MissingPackageError, need

    with pytest.raises(MissingPackageError, match=r"ml4 serve needs no-such-package .*serve\]'"):
        need("no_such_package", "ml4 serve", "serve")
