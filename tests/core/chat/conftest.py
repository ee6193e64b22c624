"""The tiny tokenizer in both versions of its template, and pieces of answers as ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from ml4core.serving.tokenizer import Tokenizer

TINY = Path(str(resources.files("ml4core") / "assets" / "ml4-tiny" / "tekken.json"))

Ids = Callable[..., list[int]]


@pytest.fixture(scope="session")
def v15() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="session")
def v13(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    described = json.loads(TINY.read_text("utf-8"))
    described["config"]["version"] = "v13"
    del described["model_settings_builder"]  # of v15 on
    path = tmp_path_factory.mktemp("v13") / "tekken.json"
    path.write_text(json.dumps(described), "utf-8")
    return Tokenizer.load(path)


@pytest.fixture(scope="session", params=["v13", "v15"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def ids(v15: Tokenizer) -> Ids:
    """Ids of texts, of which those that are names of special tokens become those."""

    def made(*parts: str) -> list[int]:
        found: list[int] = []
        for part in parts:
            special = v15.special_id(part)
            found += v15.encode(part)[1:] if special is None else [special]
        return found

    return made
