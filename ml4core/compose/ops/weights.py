"""Weights in every open format: decoding, rows, and quantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ml4core.api import WEIGHT_FORMATS, Weight
from ml4core.formats import fp8_block, fp8_tensor, mxfp4, nvfp4
from ml4core.formats.blocks import block_count, finite_amax

ROW_MULTIPLE = fp8_block.BLOCK
"""Where ``weight_rows`` may cut in any format."""


def decode_weight(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight's values in its logical shape. Unquantised data of that dtype is not copied.

    Raises ``ValueError`` for a format that is not open.
    """
    parts = weight.parts
    if weight.format in ("fp32", "bf16"):
        return parts["data"].to(dtype)
    if weight.format == "fp8_block":
        return fp8_block.dequantize_weight(parts["data"], parts["scale"], dtype=dtype)
    if weight.format == "fp8_tensor":
        scale = parts["scale"].reshape(*weight.shape[:-2], 1, 1)
        return fp8_tensor.dequantize(parts["data"], scale, dtype=dtype)
    if weight.format == "nvfp4":
        multiplier = parts["global_scale"].unsqueeze(-1)
        return nvfp4.dequantize(parts["data"], parts["scale"], multiplier=multiplier, dtype=dtype)
    if weight.format == "mxfp4":
        return mxfp4.dequantize(parts["data"], parts["scale"], dtype=dtype)
    raise _unknown(weight.format)


def weight_rows(weight: Weight, start: int, stop: int) -> Weight:
    """Rows start..stop-1 of a matrix [N, K]; both on multiples of ``ROW_MULTIPLE``, or the end."""

    def cut(name: str, part: Tensor) -> Tensor:
        if name == "scale" and weight.format == "fp8_tensor":
            return part
        if name == "scale" and weight.format == "fp8_block":
            return part[start // fp8_block.BLOCK : block_count(stop, fp8_block.BLOCK)]
        return part[start:stop]

    parts = {name: cut(name, part) for name, part in weight.parts.items()}
    return Weight(weight.format, (stop - start, *weight.shape[1:]), parts)


def quantize(x: Tensor, format: str, rule: str | None = None) -> Weight:
    """``x`` [..., K] in a weight format. Rules, the first being the default:

    - ``fp8_block``: ``linear``, or ``pow2`` for scales that are powers of two
    - ``mxfp4``: ``even``, ``floor``, ``roundup``, ``ceil``

    Raises ``ValueError`` for an unknown format or rule.
    """
    if format not in _QUANTIZERS:
        raise _unknown(format)
    rules, quantizer = _QUANTIZERS[format]
    if rule is None:
        rule = rules[0] if rules else ""
    elif rule not in rules:
        known = f"known: {', '.join(rules)}" if rules else "it has none"
        raise ValueError(f"unknown rule {rule!r} of format {format!r}; {known}")
    return Weight(format, tuple(x.shape), quantizer(x, rule))


def _fp8_block(x: Tensor, rule: str) -> dict[str, Tensor]:
    data, scale = fp8_block.quantize_weight(x, pow2=rule == "pow2")
    return {"data": data.contiguous(), "scale": scale.contiguous()}


def _fp8_tensor(x: Tensor, rule: str) -> dict[str, Tensor]:
    scale = fp8_block.block_scale(finite_amax(x.flatten(-2)), "e4m3fn")
    data, _ = fp8_tensor.quantize(x, scale=scale.unsqueeze(-1).unsqueeze(-1))
    return {"data": data, "scale": scale}


def _nvfp4(x: Tensor, rule: str) -> dict[str, Tensor]:
    # One number a matrix, kept for each row, since rows of joined matrices may differ.
    find = torch.vmap(nvfp4.global_multiplier)
    matrices = x.reshape(-1, x.shape[-2] * x.shape[-1])
    multiplier = find(matrices).reshape(*x.shape[:-2], 1)
    data, scale = nvfp4.quantize(x, multiplier=multiplier.unsqueeze(-1))
    rows = multiplier.expand(x.shape[:-1]).contiguous()
    return {"data": data, "scale": scale, "global_scale": rows}


def _mxfp4(x: Tensor, rule: str) -> dict[str, Tensor]:
    data, scale = mxfp4.quantize(x, rule)
    return {"data": data, "scale": scale}


_QUANTIZERS: Mapping[str, tuple[tuple[str, ...], Callable[[Tensor, str], dict[str, Tensor]]]] = (
    MappingProxyType(
        {
            "fp32": ((), lambda x, rule: {"data": x.to(torch.float32, copy=True)}),
            "bf16": ((), lambda x, rule: {"data": x.to(torch.bfloat16, copy=True)}),
            "fp8_block": (("linear", "pow2"), _fp8_block),
            "fp8_tensor": ((), _fp8_tensor),
            "nvfp4": ((), _nvfp4),
            "mxfp4": (("even", *(rule for rule in mxfp4.RULES if rule != "even")), _mxfp4),
        }
    )
)


def _unknown(format: str) -> ValueError:
    return ValueError(f"unknown weight format {format!r}; known: {', '.join(WEIGHT_FORMATS)}")
