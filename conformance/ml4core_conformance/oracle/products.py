"""Matrix products with weights in any open format, and what stands between them, in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core_conformance.oracle.activations import quantize_activation
from ml4core_conformance.oracle.expected import Exact, Expected, Float
from ml4core_conformance.oracle.numbers import decode_weight, dtype_name, wide

FP8_UNITS = 2.0**-11
"""What sums of FP8 products may lose, as a share of their spread: some matrix units keep 13 bits of
fraction while they add a block of 128. The quantisation itself loses thirty times as much.
"""


def embed(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    return Expected({"out": Exact(args["weight"][args["ids"]], ("T", "H"))})


def gemm(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    """``options['act']``: the format in which x is quantised first."""
    x, weight = wide(args["x"]), decode_weight(args["weight"])
    slack = None
    if act := options.get("act"):
        quantized = quantize_activation(x, act)
        x = quantized.value
        slack = torch.where(quantized.near, quantized.step, 0.0) @ weight.abs().T
        if act.startswith("fp8"):
            slack = slack + FP8_UNITS * spread(x, weight)
    value = x @ weight.T
    dtype = args.get("out_dtype") or args["x"].dtype
    size = value.abs() + spread(x, weight)
    name = str(dtype).removeprefix("torch.")
    return Expected({"out": Float(value, size, x.shape[-1], name, ("T", "N"), slack)})


def head_gemm(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    x, weight = wide(args["x"]), decode_weight(args["weight"])
    value = torch.einsum("tna,nba->tnb", x, weight)
    size = value.abs() + torch.einsum("tna,nba->tnb", x * x, weight * weight).sqrt()
    dtype = dtype_name(args["x"])
    return Expected({"out": Float(value, size, x.shape[-1], dtype, ("T", "N", "B"))})


def silu_mul(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    gate, up = wide(args["gate_up"]).chunk(2, -1)
    value = silu(gate) * up
    # exp(-gate) is off by gate's own rounding, as a share of it.
    size = value.abs() * (1 + gate.abs())
    # Beyond the range of fp32, exp(-gate) is inf and the sigmoid 0.
    slack = 2.0**-126 * (gate * up).abs()
    dtype = dtype_name(args["gate_up"])
    return Expected({"out": Float(value, size, 1, dtype, ("T", "I"), slack)})


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))"""
    return x * torch.sigmoid(x)


def silu_slope(x: Tensor) -> Tensor:
    """The derivative of ``silu``."""
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def spread(x: Tensor, weight: Tensor) -> Tensor:
    """Root of the sum of squared terms of ``x @ weight.T``."""
    return ((x * x) @ (weight * weight).T).sqrt()


ORACLE = MappingProxyType(
    {"embed": embed, "gemm": gemm, "head_gemm": head_gemm, "silu_mul": silu_mul}
)
