"""Small checkpoints to convert, and readers of what came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ml4core.models.checkpoint_writer import CheckpointWriter
from ml4core.models.quantize import QuantizeOptions, quantize
from ml4core.models.seeded import make_seeded

DIMS: Mapping[str, Any] = {
    "layers": 4,
    "hidden": 128,
    "heads": 2,
    "topk": 16,
    "experts": 2,
    "experts_per_token": 1,
    "expert_width": 160,
    "dense_width": 192,
    "v_dim": 48,
    "vocab": 320,
}

Convert = Callable[..., Path]
Make = Callable[..., Path]


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("bf16") / "m", **DIMS)


@pytest.fixture(scope="session")
def sources(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in each format, all matrices that may be."""
    found = {"bf16": bf16}
    for to in ("fp8_block", "nvfp4", "mxfp4"):
        found[to] = tmp_path_factory.mktemp(to) / "m"
        quantize(bf16, found[to], QuantizeOptions(to=to, parts="all"))  # type: ignore[arg-type]
    return found


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Converts into a new folder, and returns it."""

    def run(source: Path, name: str = "converted", **options: Any) -> Path:
        quantize(source, tmp_path / name, QuantizeOptions(**options))
        return tmp_path / name

    return run


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A folder of the given tensors."""

    def run(tensors: Mapping[str, Tensor], params: Mapping[str, Any] | None = None) -> Path:
        with CheckpointWriter(tmp_path / "source") as writer:
            writer.add_json("params.json", params or {"dim": 128})
            for name, tensor in tensors.items():
                writer.add(name, tensor)
        return tmp_path / "source"

    return run


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors, read by the safetensors library."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def params_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "params.json").read_text())
    return content


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same(one: Tensor, other: Tensor) -> bool:
    """Same bytes, whatever the dtypes."""
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*raw)


@pytest.fixture(name="tensors_of")
def tensors_of_fixture() -> Callable[[Path], dict[str, Tensor]]:
    return tensors_of


@pytest.fixture(name="params_of")
def params_of_fixture() -> Callable[[Path], dict[str, Any]]:
    return params_of


@pytest.fixture(name="content_of")
def content_of_fixture() -> Callable[[Path], dict[str, bytes]]:
    return content_of


@pytest.fixture(name="same")
def same_fixture() -> Callable[[Tensor, Tensor], bool]:
    return same
