"""Builders of checkpoint files, byte by byte, that do not use the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

Craft = Callable[..., Path]
Folder = Callable[..., Path]


def _craft(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file of a header (bytes as they are, else as JSON) and data; `length` overrides."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _folder(
    path: Path,
    shards: Mapping[str, Mapping[str, torch.Tensor]],
    index: Mapping[str, str] | bool = False,
    params: object = None,
) -> Path:
    """A checkpoint folder written by the safetensors library; index True: the right one."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "params.json").write_text(json.dumps(params if params is not None else {"dim": 8}))
    for name, tensors in shards.items():
        save_file(dict(tensors), path / name)
    if index is True:
        index = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    if index:
        kind = "model" if next(iter(shards)).startswith("model") else "consolidated"
        (path / f"{kind}.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


@pytest.fixture(scope="session")
def craft() -> Craft:
    return _craft


@pytest.fixture(scope="session")
def folder() -> Folder:
    return _folder
