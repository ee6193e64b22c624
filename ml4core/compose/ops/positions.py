"""What depends on a token's global position: rotation and the scale of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import SSMaxSpec


def rope(
    x: Tensor, positions: Tensor, inv_freq: Tensor, interleaved: bool, magnitude: float
) -> Tensor:
    """Rotates ``x`` [T, N, R] by ``positions`` [T] * ``inv_freq`` [R/2]; see the contract."""
    width = x.shape[-1]
    if inv_freq.shape[-1] * 2 != width:
        raise ValueError(
            f"rope of width {width} needs {width // 2} frequencies, got {inv_freq.shape[-1]}"
        )
    if width == 0:
        return x.clone()
    # The product of a 24-bit frequency and a 21-bit position is exact in float64.
    angle = positions.to(torch.float64).unsqueeze(-1) * inv_freq.to(torch.float64)
    cos = (torch.cos(angle).to(torch.float32) * magnitude).unsqueeze(1)
    sin = (torch.sin(angle).to(torch.float32) * magnitude).unsqueeze(1)
    wide = x.to(torch.float32)
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = wide[..., : width // 2], wide[..., width // 2 :]
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return turned.to(x.dtype)


def ssmax(
    x: Tensor,
    positions: Tensor,
    spec: SSMaxSpec,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``x`` [T, N, D] times the factor of its position [T], for each head with ``scale`` [N]."""
    if bias is not None and spec.kind != "log":
        raise ValueError(f"SSMax of kind {spec.kind!r} has no bias; only kind 'log' has")
    factor = _factor(positions, spec).unsqueeze(-1)  # [T, 1]
    if scale is not None:
        factor = factor * scale.to(torch.float32)
    elif spec.kind == "log":
        factor = factor * spec.scale
    if bias is not None:
        factor = factor + bias.to(torch.float32)
    return (x.to(torch.float32) * factor.unsqueeze(-1)).to(x.dtype)


def _factor(positions: Tensor, spec: SSMaxSpec) -> Tensor:
    """The kind's value [T], fp32, before anything learned."""
    visible = positions + 1
    if spec.n_limit is not None:
        visible = visible.clamp(max=spec.n_limit)
    n = visible.to(torch.float32)
    if spec.kind == "none":
        return torch.ones_like(n)
    if spec.kind == "llama4":
        windows = (visible - 1) // spec.original_max_position
        return 1 + spec.beta * torch.log1p(windows.to(torch.float32))
    if spec.kind == "log":
        return torch.log(n)
    if spec.kind == "pow":
        return (1 + n / spec.original_max_position) ** spec.beta
    if spec.kind == "floor":
        return 1 + spec.beta * torch.log((n / spec.original_max_position).clamp(min=1))
    raise ValueError(f"unknown SSMax kind {spec.kind!r}; known: none, llama4, log, pow, floor")
