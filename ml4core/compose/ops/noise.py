"""Random numbers that depend on a seed, a position, a purpose and an index alone.

Counter based: SplitMix64 over 64-bit integers, which wrap alike on every device. No state, so a
row's numbers are the same whatever its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

DRAW, ACCEPT, RESIDUAL = range(3)
"""Purposes. Two decisions about one position must not share their noise."""


def _signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def row_keys(seeds: Tensor, positions: Tensor, purpose: int | Tensor) -> Tensor:
    """int64 keys [...] of seeds and positions int64 [...]."""
    key = _mix(seeds + _GOLDEN)
    key = _mix(key + positions * _GOLDEN)
    return _mix(key + purpose)


def uniform(keys: Tensor, count: int) -> Tensor:
    """fp32 [..., count] in (0, 1) for keys [...], fine near 0."""
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device) * _GOLDEN
    bits = _mix(keys.unsqueeze(-1) + counter)
    high = _shift(bits, 32).to(torch.float32)
    # The largest are rounded to 2**32, and 1 must not come out.
    return ((high + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def gumbel(keys: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise fp32 [..., count] for keys [...]; always finite."""
    return -torch.log(-torch.log1p(-uniform(keys, count)))


def _shift(x: Tensor, by: int) -> Tensor:
    """Shifts zeros in from the left; int64 has no unsigned shift."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)
