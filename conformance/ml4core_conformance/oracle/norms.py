"""Norms in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core_conformance.oracle.expected import Expected, Float
from ml4core_conformance.oracle.numbers import dtype_name, half_ulp, wide


def rms_norm(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    x = args["x"]
    value, _ = _rms(wide(x), wide(args["weight"]), args["eps"])
    axes = ("T", "N", "H")[-x.dim() :] if x.dim() < 3 else ("T", "N", "H")
    return Expected({"out": Float(value, value.abs(), x.shape[-1], dtype_name(x), axes)})


def layer_norm(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    x, weight, bias = wide(args["x"]), wide(args["weight"]), wide(args["bias"])
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    # The mean of equal values is that value; fp64 may be off in its last bit.
    centred = torch.where((x == x[..., :1]).all(-1, keepdim=True), 0.0, centred)
    rate = ((centred * centred).mean(-1, keepdim=True) + args["eps"]).rsqrt()
    value = centred * rate * weight + bias
    # What a mean in fp32 is off by is blown up as the row is.
    size = (x.abs() + mean.abs()) * rate * weight.abs() + bias.abs()
    axes = ("T", "N", "D")[-x.dim() :] if x.dim() < 3 else ("T", "N", "D")
    return Expected({"out": Float(value, size, x.shape[-1], "float32", axes)})


def all_reduce_rms_norm(options: Mapping[str, Any], args: Mapping[str, Any]) -> Expected:
    """``options['ranks']``: what the other ranks hold, tensors like x; none for one rank."""
    x, residual, weight = args["x"], args["residual"], args.get("weight")
    others = options.get("ranks", ())
    shares = [wide(x), *(wide(other) for other in others)]
    total = torch.stack(shares).sum(0)
    exact = wide(residual) + total
    size = wide(residual).abs() + torch.stack([share.abs() for share in shares]).sum(0)
    # The sum over several ranks comes in x's dtype.
    slack = half_ulp(x) * size if others else None
    dtype, axes = dtype_name(residual), ("T", "H")
    results: dict[str, Any] = {"residual": Float(exact, size, len(shares) + 1, dtype, axes, slack)}
    results["hidden"] = None
    if weight is not None:
        stored = wide(exact.to(residual.dtype))
        value, rate = _rms(stored, wide(weight), args["eps"])
        if slack is not None:  # the stored residual may be a neighbour of this one
            slack = (slack + 2 * half_ulp(residual) * stored.abs()) * rate * wide(weight).abs()
        # An fp32 sum of another order may differ in its last bit, and so may what is normed.
        moved = value.abs() + size * rate * wide(weight).abs()
        results["hidden"] = Float(value, moved, x.shape[-1], dtype, axes, slack)
    return Expected(results)


def _rms(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and what x is multiplied by before the weight."""
    rate = ((x * x).mean(-1, keepdim=True) + eps).rsqrt()
    return x * rate * weight, rate


ORACLE = MappingProxyType(
    {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "all_reduce_rms_norm": all_reduce_rms_norm,
    }
)
