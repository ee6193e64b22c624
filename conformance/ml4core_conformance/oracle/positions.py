"""Rotation by position, and the query's scale by position, in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core.api import SSMaxSpec
from ml4core_conformance.oracle.expected import Expected, Float
from ml4core_conformance.oracle.numbers import dtype_name, wide

_AXES = ("T", "N", "R")


def rope(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    x = wide(args["x"])
    # A 24-bit frequency times a 21-bit position is exact in fp64.
    angle = args["positions"].to(torch.float64).unsqueeze(-1) * wide(args["inv_freq"])
    cos, sin = (f(angle).unsqueeze(1) * args["magnitude"] for f in (torch.cos, torch.sin))
    half = x.shape[-1] // 2
    if args["interleaved"]:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    low, high = first * cos - second * sin, first * sin + second * cos
    size = (first.abs() + second.abs()) * abs(args["magnitude"])
    join = _interleave if args["interleaved"] else _halves
    value, bound = join(low, high), join(size, size)
    return Expected({"out": Float(value, bound, 2, dtype_name(args["x"]), _AXES)})


def ssmax(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    x, spec = wide(args["x"]), args["spec"]
    heads = x.shape[1]
    factor = _factor(args["positions"], spec).unsqueeze(-1).expand(-1, heads)  # [T, N]
    scale, bias = args.get("scale"), args.get("bias")
    if scale is not None:
        factor = factor * wide(scale)
    elif spec.kind == "log":
        factor = factor * spec.scale
    size = factor.abs()
    if bias is not None:
        factor, size = factor + wide(bias), size + wide(bias).abs()
    value, bound = x * factor.unsqueeze(-1), x.abs() * size.unsqueeze(-1)
    return Expected({"out": Float(value, bound, 2, dtype_name(args["x"]), ("T", "N", "D"))})


def _factor(positions: Tensor, spec: SSMaxSpec) -> Tensor:
    """fp64 [T], before anything learned; n is the visible keys."""
    n = positions.to(torch.float64) + 1
    if spec.n_limit is not None:
        n = n.clamp(max=spec.n_limit)
    origin = spec.original_max_position
    if spec.kind == "llama4":
        return 1 + spec.beta * torch.log1p(torch.floor((n - 1) / origin))
    if spec.kind == "log":
        return torch.log(n)
    if spec.kind == "pow":
        return (1 + n / origin) ** spec.beta
    if spec.kind == "floor":
        return 1 + spec.beta * torch.log((n / origin).clamp(min=1))
    return torch.ones_like(n)


def _interleave(low: Tensor, high: Tensor) -> Tensor:
    return torch.stack((low, high), -1).flatten(-2)


def _halves(low: Tensor, high: Tensor) -> Tensor:
    return torch.cat((low, high), -1)


ORACLE = MappingProxyType({"rope": rope, "ssmax": ssmax})
