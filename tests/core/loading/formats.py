"""Checkpoints in every format, and what their tensors mean, worked out from the bytes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ml4core.api import LayerSpec, Weight
from ml4core.compose.ops.weights import decode_weight
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.shards import Shard
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers

QUANTISED = ("fp8_block", "fp8_tensor", "nvfp4_ct", "nvfp4_modelopt", "mxfp4")
KINDS = {"nvfp4_ct": "nvfp4", "nvfp4_modelopt": "nvfp4"}
"""Format of a checkpoint -> that of its experts' weights, where the two differ."""

Loaded = dict[int | None, dict[str, Any]]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def load(
    folder: Path, dtype: torch.dtype = torch.float32, shard: Shard | None = None
) -> tuple[Loaded, dict[int, LayerSpec], Checkpoint]:
    """Weights by layer, the layers that came with them, and the checkpoint that was read."""
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    weights: Loaded = {}
    layers: dict[int, LayerSpec] = {}
    for layer, found in load_layers(checkpoint, spec, dtype, shard=shard):
        weights[layer and layer.index] = found
        if layer is not None:
            layers[layer.index] = layer
    return weights, layers, checkpoint


def raw(folder: Path) -> dict[str, Tensor]:
    """The tensors as the format's own library reads them."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def values(weight: Weight | Tensor) -> Tensor:
    """fp64 values of a weight."""
    data = decode_weight(weight) if isinstance(weight, Weight) else weight
    return data.double()


def meaning(tensors: dict[str, Tensor], stem: str) -> Tensor:
    """fp32 values of one matrix of a checkpoint, whatever its format, by its definition."""
    parts = {k.removeprefix(f"{stem}."): v for k, v in tensors.items() if k.startswith(f"{stem}.")}
    packed = parts.get("weight_packed")
    data = packed if packed is not None else parts["weight"]
    if data.dtype == torch.uint8:
        return _four_bit(data, parts)
    if data.dtype != torch.float8_e4m3fn:
        return data.float()
    if "qscale_weight" in parts:
        return data.float() * parts["qscale_weight"]
    scale = parts["weight_scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return data.float() * scale[: data.shape[0], : data.shape[1]]


def _four_bit(data: Tensor, parts: dict[str, Tensor]) -> Tensor:
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(1).long()
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)])
    numbers, scale = table[codes], parts["weight_scale"]
    if scale.dtype == torch.uint8:
        powers = torch.exp2(scale.double() - 127).float()
        return numbers * powers.repeat_interleave(32, 1)
    wide = scale.float().repeat_interleave(16, 1)
    if "weight_scale_2" in parts:
        return numbers * (wide * parts["weight_scale_2"])
    return numbers * (wide / parts["weight_global_scale"])
