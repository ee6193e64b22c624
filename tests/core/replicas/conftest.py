"""Replicas as processes of this machine, asked and heard."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.seeded import make_seeded
from ml4core.registry import Choice, FoundDevice, find, load_plugin

CHILD = Path(__file__).with_name("replica_process.py")
SIZES: dict[str, Any] = {
    "model": "ml4-tiny",
    "max_model_len": 96,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}
PATIENCE_S = 120
"""Of the tests, on a machine that does much else."""


class Replica:
    """A process, and what it has said."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(flags)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[list[Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        self._write([name, prompt, tokens])

    def end(self) -> None:
        self._write(None)

    def hear(self, seconds: float = PATIENCE_S) -> list[Any]:
        """What it says next."""
        return self._said.get(timeout=seconds)

    def _write(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(["gone"])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


Launch = Callable[..., list[Replica]]


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(name="free_port")
def free_port_fixture() -> Callable[[], int]:
    return free_port


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts two replicas by flags; ``unlike``: those of the second that differ."""
    started: list[Replica] = []

    def begin(unlike: dict[str, Any] | None = None, **flags: Any) -> list[Replica]:
        ranks = {"data_parallel_size": 2, "data_parallel_size_local": 1}
        alike = SIZES | ranks | {"data_parallel_rpc_port": free_port()} | flags
        found = [
            Replica(alike | {"data_parallel_start_rank": rank} | (unlike or {} if rank else {}))
            for rank in range(2)
        ]
        started.extend(found)
        return found

    yield begin
    for one in started:
        one.kill()


@pytest.fixture(scope="session")
def choice() -> Choice:
    """The cpu backend, without a process that looks for devices."""
    plugin = load_plugin(find("cpu"))
    (device,) = plugin.backend.probe().devices
    return Choice(plugin, (FoundDevice(device, plugin.backend.capabilities(device)),))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices two ranks can share, and whose experts four."""
    where = tmp_path_factory.mktemp("replicas") / "m"
    return make_seeded(where, "micro", layers=2, vocab=320, experts=4)


@pytest.fixture(scope="session")
def alone(choice: Choice) -> Callable[..., list[list[int]]]:
    """What one engine, alone, makes of prompts."""

    def made(prompts: list[list[int]], tokens: int, **flags: Any) -> list[list[int]]:
        args = EngineArgs(backend="cpu", **(SIZES | flags))
        engine = open_engine(args, choice=choice, sequences=4, tokens_each=96)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        found = [one.token_ids for one in engine.generate(prompts, params)]
        engine.close()
        return found

    return made
