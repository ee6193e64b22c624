"""Small seeded checkpoints, headers without files, and edited copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import ModelSpec
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.layer_table import build_model_spec
from ml4core.models.safetensors_file import DTYPES, TensorInfo
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS
from ml4core.models.tensor_table import expected_tensors

# No matrix is square, no two axes of one are equal: only the right orientation has the right shape.
DIMS: Mapping[str, Any] = {
    "layers": 8,
    "hidden": 128,
    "heads": 4,
    "topk": 16,
    "experts": 3,
    "experts_per_token": 2,
    "expert_width": 256,
    "dense_width": 384,
    "v_dim": 48,
    "vocab": 320,
}


@pytest.fixture(scope="session")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("bf16") / "m", **DIMS)


@pytest.fixture(scope="session")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("fp8") / "m", format="fp8_block", **DIMS)


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    from dataclasses import replace

    return build_model_spec(replace(PRESETS["tiny"], **DIMS).params())


def info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """A header's entry, of a file that does not exist."""
    size = math.prod(shape) * DTYPES[dtype].itemsize
    return TensorInfo(name, dtype, shape, Path("x.safetensors"), 0, size)


def headers(spec: ModelSpec, quantised: bool = False) -> dict[str, TensorInfo]:
    """The headers of a right checkpoint."""
    result = {}
    for name, entry in expected_tensors(spec).items():
        if not entry.used:
            continue
        fp8 = quantised and entry.kind == "matrix" and entry.role not in ("output",)
        result[name] = info(name, "F8_E4M3" if fp8 else "BF16", entry.shapes[0])
        if fp8:
            rows, columns = entry.shapes[0]
            scale = f"{name}_scale"
            result[scale] = info(scale, "F32", (-(-rows // 128), -(-columns // 128)))
    return result


@pytest.fixture(scope="session")
def make_headers() -> Callable[..., dict[str, TensorInfo]]:
    return headers


@pytest.fixture(scope="session")
def make_info() -> Callable[[str, str, tuple[int, ...]], TensorInfo]:
    return info


Edit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture
def edited_copy(tmp_path: Path) -> Callable[[Path, Edit], Path]:
    """A copy of a checkpoint, its tensors changed by a function."""

    def make(folder: Path, edit: Edit) -> Path:
        source = Checkpoint.open(folder)
        tensors = {name: source.read(name) for name in source.tensors}
        edit(tensors)
        with CheckpointWriter(tmp_path / "copy") as writer:
            assert source.params is not None
            writer.add_json("params.json", source.params)
            for name, tensor in tensors.items():
                writer.add(name, tensor)
        return tmp_path / "copy"

    return make
