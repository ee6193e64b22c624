"""A server whose engine has several ranks, and what it does once one of them is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from ml4core.models.seeded import make_seeded

pytestmark = pytest.mark.multiprocess

TEXT = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [5], "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("served") / "m"
    make_seeded(folder, "micro", layers=2, vocab=8192)
    return (
        *(str(folder), "--backend", "cpu", "--max-model-len", "256", "--max-num-seqs", "4"),
        *("--tensor-parallel-size", "2", "--enable-expert-parallel"),
    )


@pytest.mark.alone
def test_a_killed_rank_is_told_within_seconds(
    words: Any, start: Callable[..., Any], until: Any, alive: Callable[[int], bool]
) -> None:
    server = start(*words)
    answer = server.post(TEXT, BODY)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    ranks = server.get("/report").json()["parallel"]["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1]
    assert ranks[0]["process"] == server.engine_pid
    more = BODY | {"max_tokens": 200, "stream": True}
    with server.http() as client:
        assert client.get("/ready").status_code == 200
        with client.stream("POST", TEXT, json=more) as lines:
            text = lines.iter_lines()
            next(text)
            os.kill(ranks[1]["process"], signal.SIGKILL)
            killed = time.monotonic()
            *_, last = [line for line in text if line.startswith("data: {")]
        gone = until(lambda: (r := client.get("/ready")).status_code == 503 and r)
        assert time.monotonic() - killed < 5
    for told in (last, gone.json()["error"]["message"]):
        assert "fault 'rank': rank 1 of 2: its process" in told
        assert "SIGKILL" in told
    assert server.process.wait(60) == 4
    assert not any(alive(one["process"]) for one in ranks)


def test_a_server_ends_its_ranks(
    words: Any, start: Callable[..., Any], alive: Callable[[int], bool]
) -> None:
    server = start(*words)
    ranks = [one["process"] for one in server.get("/report").json()["parallel"]["ranks"]]
    assert all(map(alive, ranks))
    assert server.stop() == 0
    assert not any(map(alive, ranks))
    assert "terminate" not in "".join(server.noise)
