"""The way back from `export`: a checkpoint's weights as those of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark_weights import validate_draft
from ml4core.models.tensors import TensorReport, validate
from ml4core.models.weight_reader import WeightReader
from tools.train_tiny.draft import Drafter, DraftLayer
from tools.train_tiny.export import DRAFT, decoder_tensors, draft_tensors
from tools.train_tiny.layers import Attention
from tools.train_tiny.model import TinyModel

_UP = "attention.wkv_b"


@torch.no_grad()
def read_decoder(folder: Path, model: TinyModel) -> None:
    """Fill `model`, of any format, decoded. Raises CheckpointError if the tensors don't fit."""
    checkpoint = Checkpoint.open(folder)
    reader, report = _reader(checkpoint, validate(checkpoint, model.spec))
    _fill(reader, report, decoder_tensors(model))
    for layer in model.spec.layers:
        _fill_up(reader, f"layers.{layer.index}.{_UP}", model.block(layer.index).attention)


@torch.no_grad()
def read_drafter(folder: Path, drafter: Drafter) -> None:
    """As `read_decoder`."""
    checkpoint = Checkpoint.open(folder)
    reader, report = _reader(checkpoint, validate_draft(checkpoint, drafter.spec))
    _fill(reader, report, draft_tensors(drafter))
    for spec, layer in zip(drafter.spec.layers, drafter.layers, strict=True):
        _fill_up(reader, f"{DRAFT}layers.{spec.index}.{_UP}", cast(DraftLayer, layer))


def _reader(checkpoint: Checkpoint, report: TensorReport) -> tuple[WeightReader, TensorReport]:
    return WeightReader(checkpoint, report, torch.float32), report


def _fill(reader: WeightReader, report: TensorReport, named: Iterable[tuple[str, Tensor]]) -> None:
    for name, target in named:
        stem = name.removesuffix(".weight")
        if not stem.endswith(_UP):  # `export` makes it of two
            target.copy_(reader.dense(stem) if stem in report.matrices else reader.vector(name))


def _fill_up(reader: WeightReader, stem: str, layer: Attention | DraftLayer) -> None:
    parts = (layer.w_uk, layer.w_uv)
    whole = reader.dense(stem).unflatten(0, (layer.heads, -1))
    heights = [part.shape[0] // layer.heads for part in parts]
    for part, heads in zip(parts, whole.split(heights, dim=1), strict=True):
        part.copy_(heads.flatten(0, 1))
