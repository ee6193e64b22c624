"""Engines on a device that tells of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.models.seeded import make_seeded
from ml4core.registry import Choice, select
from support.metered import Meter, Metered, metered


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("started") / "m", "micro", layers=2, vocab=320)


@pytest.fixture(scope="module")
def plain(probed_once: None) -> Choice:
    """The cpu backend as it is."""
    return select("cpu")


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def spoils() -> set[str]:
    """What the device does wrong: ``caches`` are larger than asked for."""
    return set()


@pytest.fixture
def sessions() -> list[Metered]:
    """Those that were opened."""
    return []


@pytest.fixture
def chip(
    plain: Choice,
    meter: Meter,
    spoils: set[str],
    sessions: list[Metered],
    monkeypatch: pytest.MonkeyPatch,
) -> Choice:
    return metered(plain, meter, monkeypatch, spoils, sessions)


Start = Callable[..., Engine]


@pytest.fixture
def start(chip: Choice, folder: Path) -> Iterator[Start]:
    """Opens an engine on it by flags."""
    opened: list[Engine] = []

    def start(fill: bool = True, sequences: int = 4, told: Any = None, **flags: Any) -> Engine:
        sizes = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32}
        args = EngineArgs(str(folder), backend="cpu", **(sizes | {"block_size": 16} | flags))
        engine = open_engine(
            args, choice=chip, sequences=sequences, tokens_each=64, fill=fill, starting=told
        )
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()
