"""Servers in processes of their own, and clients for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

START_SECONDS = 240.0
"""Generous: a loaded machine takes minutes to import what a fresh one does in seconds."""


class Server:
    """``ml4 serve`` at a free port.

    Attributes:
        lines: of its log, as objects.
    """

    def __init__(self, *words: str, **environment: str) -> None:
        # Its own session: no Ctrl-C of the terminal reaches it, and a test can look for orphans.
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ml4core", "serve"),
                *("--port", "0", "--log-format", "json", *words),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.noise: list[str] = []
        self._clients: list[httpx.Client | openai.OpenAI] = []
        self._silent = False
        self._known = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                with self._known:
                    try:
                        self.lines.append(json.loads(line))
                    except ValueError:
                        self.noise.append(line)
                    self._known.notify_all()
        with self._known:
            self._silent = True
            self._known.notify_all()

    def event(self, name: str, seconds: float = 60.0) -> dict[str, Any]:
        """The first line of an event, waited for."""

        def known() -> Any:
            return next((x for x in self.lines if x.get("event") == name), None)

        with self._known:
            found = self._known.wait_for(lambda: known() or self._silent, seconds)
        assert found, f"no {name} within {seconds} s: {self.noise} {self.lines}"
        found = known()
        assert found, f"ended with {self.process.poll()}: {''.join(self.noise)} {self.lines}"
        return found

    @property
    def url(self) -> str:
        return str(self.event("serving", START_SECONDS)["url"])

    @property
    def engine_pid(self) -> int:
        return int(self.event("serving", START_SECONDS)["engine_pid"])

    def http(self, **options: Any) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=120, **options)
        self._clients.append(client)  # closed with the server, if not before
        return client

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 120} | options
        client = openai.OpenAI(base_url=f"{self.url}/v1", **options)
        self._clients.append(client)
        return client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str) -> httpx.Response:
        with self.http() as client:
            return client.get(path)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        return metric(self.get("/metrics").text, name, **labels)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
        self._reader.join(30)


def metric(text: str, name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.split("{")[0].split(" ")[0] == name and all(one in line for one in wanted)
    ]
    assert values, f"no {name} {labels}"
    return sum(values)


@pytest.fixture(name="metric")
def metric_fixture() -> Callable[..., float]:
    return metric


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers, which end with the session at the latest."""
    started: list[Server] = []

    def begin(*words: str, **environment: str) -> Server:
        server = Server(*words, **environment)
        started.append(server)
        return server

    yield begin
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def tiny(start: Callable[..., Server]) -> Server:
    """The shipped model on the cpu backend, with all that a server offers."""
    return start(
        *("--backend", "cpu", "--max-model-len", "1024", "--max-num-seqs", "8"),
        "--enable-prefix-caching",
        *("--speculative-config", '{"method": "dspark"}'),
        *("--tool-call-parser", "mistral", "--enable-auto-tool-choice"),
        *("--reasoning-parser", "mistral", "--vllm-metrics"),
    )


@pytest.fixture(scope="session")
def null(start: Callable[..., Server]) -> Server:
    """An engine that computes nothing: for what a server does itself."""
    return start(
        *("--null-step-ms", "1", "--max-model-len", "4096", "--max-num-seqs", "8"),
        *("--max-queue", "64", "--enable-prefix-caching", "--max-request-bytes", "6M"),
        *("--tool-call-parser", "mistral", "--enable-auto-tool-choice"),
        *("--reasoning-parser", "mistral"),
    )


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Waits for something to be so; what it was then."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return found


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    return until


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process lives."""

    def lives(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    return lives


@pytest.fixture
def ml4(start: Callable[..., Server]) -> Callable[..., tuple[int, str]]:
    """A server that is expected to end by itself: its exit code, and what it said."""

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "ml4core", "serve", *words],
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def ml4_here(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The same in this process, for what ends before a server is started."""
    from ml4core.cli import main

    def run(*words: str) -> tuple[int, str]:
        code = main(["serve", *words])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run
