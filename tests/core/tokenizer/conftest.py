"""The tiny tokenizer, read once."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from ml4core.serving.tokenizer import Tokenizer

TINY = Path(str(resources.files("ml4core") / "assets" / "ml4-tiny" / "tekken.json"))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="session")
def tiny() -> Path:
    return TINY
