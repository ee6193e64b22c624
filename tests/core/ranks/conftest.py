"""Engines of several ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.models.seeded import make_seeded
from ml4core.registry import Choice, select

SIZES: dict[str, Any] = {"max_model_len": 96, "block_size": 16, "max_num_seqs": 4}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("ranked") / "m", "micro", layers=2, vocab=320)


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the backend ``ranked``."""
    info = tmp_path_factory.mktemp("site") / "ranked-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ranked\nVersion: 1.0\nKeywords: ml4core-api:1-1\n", "utf-8"
    )
    (info / "entry_points.txt").write_text("[ml4core.backends]\nranked = support.ranked\n", "utf-8")
    return info.parent


@pytest.fixture
def site(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it on the path."""
    monkeypatch.syspath_prepend(str(plugins))


@pytest.fixture(scope="session")
def choose() -> Callable[[str], Choice]:
    """A backend, probed once."""
    return cache(select)


def alive(pid: int) -> bool:
    """Whether a process lives."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children() -> set[int]:
    """Processes of this one that live."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in found if alive(pid)}


@pytest.fixture(name="alive")
def alive_fixture() -> Callable[[int], bool]:
    return alive


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process, no group, no thread and no setting outlives a test."""
    before, threads = children(), torch.get_num_threads()
    yield
    end = time.monotonic() + 5
    while children() - before and time.monotonic() < end:
        time.sleep(0.02)
    assert children() <= before
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads


Start = Callable[..., Engine]


@pytest.fixture
def start(folder: Path, choose: Callable[[str], Choice], nothing_left: None) -> Iterator[Start]:
    """Opens an engine by flags, of two ranks if they don't say otherwise."""
    opened: list[Engine] = []

    def begin(
        model: Path | str = folder, ranks: int = 2, backend: str = "cpu", **flags: Any
    ) -> Engine:
        more: dict[str, Any] = {key: flags.pop(key) for key in ("fill",) if key in flags}
        args = EngineArgs(
            str(model), backend=backend, tensor_parallel_size=ranks, **(SIZES | flags)
        )
        opened.append(
            open_engine(args, choice=choose(backend), sequences=4, tokens_each=64, **more)
        )
        return opened[-1]

    yield begin
    for engine in opened:
        engine.close()
