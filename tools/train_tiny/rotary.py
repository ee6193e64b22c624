"""What depends on a token's position, in a form that gradients flow through."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ml4core.api import RopeSpec, SSMaxSpec
from ml4core.models.rope_freqs import inv_freq, yarn_stretch


class Places(NamedTuple):
    """Of T positions: rotation fp32 [T, R/2], and ln(position + 1) fp32 [T]."""

    cos: Tensor
    sin: Tensor
    log_n: Tensor

    def detach(self) -> Places:
        return Places(self.cos.detach(), self.sin.detach(), self.log_n)


def base_frequencies(rope: RopeSpec, stretched: bool) -> Tensor:
    """fp32 [R/2] without what is learned; `stretched`: with YaRN's factors, if there are any."""
    half = rope.dim // 2
    if rope.yarn is None or stretched:
        learned = None if rope.lerope == "none" else torch.ones(half)
        return inv_freq(rope, learned)
    factors = torch.tensor(yarn_stretch(rope.yarn, rope.dim, rope.theta), dtype=torch.float64)
    learned = None if rope.lerope == "none" else torch.ones(half)
    return (inv_freq(rope, learned).double() / factors).float()


def places(positions: Tensor, frequencies: Tensor) -> Places:
    """`positions` [T] turned by `frequencies` [R/2], which may have a gradient."""
    angle = positions.float().unsqueeze(-1) * frequencies
    return Places(angle.cos(), angle.sin(), (positions + 1).float().log())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, n, R] by pairs (2j, 2j + 1); cos and sin [T, R/2] or [B, T, R/2]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)


def ssmax_factor(log_n: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 [T, heads, 1]: s ln(n) + b of each head."""
    factor = log_n.unsqueeze(-1) * scale
    return (factor if bias is None else factor + bias).unsqueeze(-1)


def require_learned_log(ssmax: SSMaxSpec, what: str) -> None:
    """Training knows one kind of SSMax. Raises ValueError for others."""
    if ssmax.kind != "log" or not ssmax.per_head or ssmax.n_limit is not None:
        raise ValueError(f"{what}: {ssmax}; kind 'log', per head, of the whole context is trained")
