"""The three accelerator plugins, as their projects declare them."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ml4core.registry import PluginRecord

PROJECTS = Path(__file__).resolve().parents[3] / "backends"


def _record(name: str) -> PluginRecord:
    project = tomllib.loads((PROJECTS / name / "pyproject.toml").read_text("utf-8"))["project"]
    (target,) = project["entry-points"]["ml4core.backends"].values()
    return PluginRecord(name, project["name"], project["version"], target, (1, 1))


@pytest.fixture(params=["cuda", "rocm", "tpu"])
def record(request: pytest.FixtureRequest) -> PluginRecord:
    return _record(request.param)


@pytest.fixture
def rocm() -> PluginRecord:
    return _record("rocm")


@pytest.fixture
def cuda() -> PluginRecord:
    return _record("cuda")


@pytest.fixture
def tpu() -> PluginRecord:
    return _record("tpu")


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, for stand-ins of vendor libraries; they are forgotten afterwards."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    for name in ("torch", "triton", "jax", "libtpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
