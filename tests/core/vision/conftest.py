"""One small random encoder for all tests that don't write their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml4core.api import VisionSpec, VisionWeights

from .support import random_tensors, read, spec_of, write


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("vision") / "m", random_tensors(spec_of()))


@pytest.fixture(scope="session")
def encoder(folder: Path) -> tuple[VisionSpec, VisionWeights]:
    return read(folder)
