"""Several processes train as one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.train_tiny import state
from tools.train_tiny.config import dense_params

ROOT = Path(__file__).parents[2]
LENGTH = "32"

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def train(shape, corpus, needles, tmp_path):
    """Run one command of the tool, alone or with two processes; what it printed."""
    bins = tmp_path / "bin"
    bins.mkdir()
    for split in ("train", "valid"):
        for name in corpus.parts:
            corpus.part(name).tofile(bins / f"{name}.{split}.bin")
    (tmp_path / "tiny.json").write_text(json.dumps(shape.params))
    (tmp_path / "dense.json").write_text(json.dumps(dense_params(shape.params)))

    def run(command: str, folder: str, *more: str, processes: int, params: str = "tiny") -> str:
        arguments = ["--shape", str(tmp_path / f"{params}.json"), "--run", str(tmp_path / folder)]
        done = subprocess.run(
            [sys.executable, "-m", "tools.train_tiny", command, *arguments,
             "--corpus", str(tmp_path), "--device", "cpu", "--processes", str(processes), *more],
            cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state.load(path)["modules"]["model"]
    return found


def test_two_processes_take_the_steps_of_one(train, tmp_path):
    sizes = ("--tokens", str(10 * 4 * 32), "--batch", "4", "--length", LENGTH, "--warm-up", "2")
    more = (*sizes, "--dropout", "0")
    alone = train("main", "one", *more, processes=1, params="dense")
    said = train("main", "two", *more, processes=2, params="dense")
    assert "2 processes" in said
    assert "drifted" not in said
    assert said.count("main 10/10") == 1, "only the first process prints"
    last = [text.split("main 10/10 ")[1].split(" norm")[0] for text in (alone, said)]
    assert last[0] == last[1]
    one, two = (weights(tmp_path / name / "main.pt") for name in ("one", "two"))
    for name, value in one.items():
        assert (two[name] - value).norm() < 2e-3 * value.norm() + 1e-4, name


@pytest.mark.slow
def test_every_phase_runs_with_two_processes(train, tmp_path):
    sizes = ("--batch", "4", "--length", LENGTH, "--warm-up", "2")
    train("main", "run", "--tokens", "500", *sizes, processes=2)
    train("indexer", "run", "--steps", "2", *sizes, processes=2)
    train("sparse", "run", "--steps", "2", *sizes, processes=2)
    train("draft", "run", "--steps", "4", "--own", "8", *sizes, processes=2)
    kept = [state.load(tmp_path / "run" / f"own-words-{i}-of-2.pt")["ids"] for i in range(2)]
    assert kept[0].shape == kept[1].shape == (4, 33)
    assert not torch.equal(*kept), "each process has words of its own"
    more = ("--length", LENGTH, "--lengths", "200", "--samples", "2", "--parts", "chat_basics")
    out = ("--windows", "6", "--out", str(tmp_path / "figures.json"))
    train("evaluate", "run", *more, *out, processes=2)
    two = json.loads((tmp_path / "figures.json").read_text())
    train("evaluate", "run", *more, *out, processes=1)
    one = json.loads((tmp_path / "figures.json").read_text())
    assert set(one) == {"after", "dense", "sparse", "acceptance"} | {
        f"retrieval 200 {form}" for form in ("dense", "sparse")
    }
    assert one == two
    assert len(one["retrieval 200 dense"]) == 10
    assert len(one["acceptance"]["chat_basics"]) == 4


def test_a_batch_that_does_not_divide_is_refused(train):
    with pytest.raises(AssertionError, match="no multiple of 2 processes"):
        train("main", "run", "--tokens", "500", "--batch", "3", "--length", LENGTH, processes=2)


def test_a_group_that_is_left_leaves_no_thread():
    """One that outlives the interpreter's end aborts the process."""
    program = """
import os, torch, torch.distributed as dist
from tools.train_tiny.ranks import Ranks, join
ranks, _ = join("cpu")
import torch._dynamo
dist.all_reduce(torch.ones(3))
names = lambda: {open(f"/proc/self/task/{n}/comm").read() for n in os.listdir("/proc/self/task")}
assert any("gloo" in name for name in names()), names()
ranks.leave()
assert not any("gloo" in name for name in names()), names()
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT, text=True, stderr=subprocess.PIPE,
            env={**os.environ, **place, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=100)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
