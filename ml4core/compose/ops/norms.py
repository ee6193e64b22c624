"""Norms."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import Collectives

_HUGE = 2.0**40  # a row beyond this might overflow when squared, so it is normed at
_SHRINK = 2.0**-80  # this scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis ``[..., H]``, in x's dtype."""
    wide = x.to(torch.float32)
    # A power of two, and 1 for all but huge rows: nothing is rounded by it.
    largest = torch.maximum(wide.amax(-1, keepdim=True), -wide.amin(-1, keepdim=True))
    shrink = torch.where(largest > _HUGE, _SHRINK, 1.0)
    wide = wide * shrink  # a tensor of its own: what follows works in place
    mean = (wide * wide).mean(-1, keepdim=True)
    wide = wide.mul_(torch.rsqrt(mean + eps * (shrink * shrink)))
    return wide.mul_(weight.to(torch.float32)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis ``[..., D]``, fp32. Weight and bias are ``[D]`` or broadcast."""
    wide = x.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    # Again: what rounding left in the mean of a constant row would be blown up by 1 / sqrt(eps).
    centred = centred - centred.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + eps) * weight + bias


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, collectives: Collectives
) -> tuple[Tensor, Tensor | None]:
    """The residual ``[T, H]`` plus the sum of ``x`` over ranks, and its norm if given a weight."""
    total = collectives.all_reduce(x)
    summed = (residual.to(torch.float32) + total.to(torch.float32)).to(residual.dtype)
    return summed, None if weight is None else rms_norm(summed, weight, eps)
