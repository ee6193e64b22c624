"""A micro model with seeded weights, and what a test may want to know of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ml4core.models.seeded import make_seeded
from ml4core.serving.llm import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return make_seeded(tmp_path_factory.mktemp("llm") / "micro", "micro", layers=4)


@pytest.fixture(scope="module")
def llm(folder: Path, probed_once: None) -> Any:
    with LLM(str(folder), max_model_len=128, block_size=16, max_num_seqs=4) as made:
        yield made


def held_pages(engine: Any) -> int:
    return sum(pool.used_pages for pool in engine.core.kv.pools.values())


def spoil(engine: Any) -> None:
    """From now on each step makes a NaN."""
    engine.runner.weights.layers[0]["index_wk"].data[0, 0] = float("nan")


@pytest.fixture(name="held_pages")
def held_pages_fixture() -> Any:
    return held_pages


@pytest.fixture(name="spoil")
def spoil_fixture() -> Any:
    return spoil
