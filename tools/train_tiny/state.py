"""What a run keeps between its parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write all of `content`, or leave the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".writing")
    with open(temporary, "wb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return content


def pack(weights: Mapping[str, Tensor], folder: Path, part_bytes: int, stem: str) -> list[Path]:
    """bf16 copies of `weights` in files of at most `part_bytes` each, larger tensors alone."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        small = tensor.detach().to("cpu", torch.bfloat16).contiguous().clone()
        if size and size + small.nbytes > part_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = small
        size += small.nbytes
    paths = []
    for number, part in enumerate(parts):
        paths.append(folder / f"{stem}-{number}.pt")
        save(paths[-1], part)
    return paths


def unpack(folder: Path, stem: str) -> dict[str, Tensor]:
    """What `pack` wrote, as fp32."""
    files = sorted(folder.glob(f"{stem}-*.pt"))
    if not files:
        raise ValueError(f"{folder}: no {stem}-*.pt")
    return {name: tensor.float() for file in files for name, tensor in load(file).items()}
