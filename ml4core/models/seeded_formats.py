"""A seeded matrix as the tensors of a checkpoint, by suffix, in each format that others write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core.formats import fp8_block, fp8_tensor, mxfp4, nvfp4
from ml4core.models.shards import EXPERT_ROLES
from ml4core.models.tensor_table import Expected

NEVER_QUANTISED = frozenset({"output", "index_weights_proj"})
"""Roles that stay unquantised in an FP8 checkpoint, as in published ones."""
_INPUT_AMAX = 8.0  # what inputs are said not to pass, by fixed activation scales


def params(format: str) -> dict[str, Any]:
    """What a format adds to params.json."""
    if format != "fp8_tensor":
        return {}
    return {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}}


def format_of(entry: Expected, format: str) -> str:
    """The format of one tensor in a checkpoint of a quantised `format`."""
    if entry.kind != "matrix" or entry.role in NEVER_QUANTISED:
        return "bf16"
    if format in ("fp8_block", "fp8_tensor") or entry.role in EXPERT_ROLES:
        return format
    return "fp8_block"


def tensors(values: Tensor, format: str, suffix: str = "weight") -> dict[str, Tensor]:
    """The tensors of `values`, fp32, by suffix. `suffix` is that of the data where it is plain."""
    if format in _PLAIN:
        return {suffix: values.to(_PLAIN[format])}
    return _WRITERS[format](values)


def _fp8_block(values: Tensor) -> dict[str, Tensor]:
    code, scale = fp8_block.quantize_weight(values)
    return {"weight": code.view(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_tensor(values: Tensor) -> dict[str, Tensor]:
    code, scale = fp8_tensor.quantize(values)
    return {"weight": code.view(torch.float8_e4m3fn), "qscale_weight": scale}


def _nvfp4_ct(values: Tensor) -> dict[str, Tensor]:
    divisor = nvfp4.global_divisor(values)
    data, scale = nvfp4.quantize(values, divisor=divisor)
    return {
        "weight_packed": data,
        "weight_scale": scale.view(torch.float8_e4m3fn),
        "weight_global_scale": divisor.reshape(1),
        "input_global_scale": torch.tensor([nvfp4.RANGE / _INPUT_AMAX]),
    }


def _nvfp4_modelopt(values: Tensor) -> dict[str, Tensor]:
    multiplier = nvfp4.global_multiplier(values)
    data, scale = nvfp4.quantize(values, multiplier=multiplier)
    return {
        "weight": data,
        "weight_scale": scale.view(torch.float8_e4m3fn),
        "weight_scale_2": multiplier,
        "input_scale": torch.tensor(_INPUT_AMAX / nvfp4.RANGE),
    }


def _mxfp4(values: Tensor) -> dict[str, Tensor]:
    data, scale = mxfp4.quantize(values, "even")
    return {"weight": data, "weight_scale": scale}


_PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp32": torch.float32}
)
_WRITERS: Mapping[str, Callable[[Tensor], dict[str, Tensor]]] = MappingProxyType(
    {
        "fp8_block": _fp8_block,
        "fp8_tensor": _fp8_tensor,
        "nvfp4_ct": _nvfp4_ct,
        "nvfp4_modelopt": _nvfp4_modelopt,
        "mxfp4": _mxfp4,
    }
)
