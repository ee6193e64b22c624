"""Exact orders: floats as integers, and the first of the largest."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = -(2**31)
"""Below the key of every float but one NaN."""


def order_key(x: Tensor) -> Tensor:
    """int32 keys in the order of ``x`` [...] as fp32. Both zeros have one key; NaN has any."""
    wide = x.to(torch.float32)
    bits = torch.where(wide == 0, 0.0, wide).contiguous().view(torch.int32)
    # Negative floats grow downwards: flip all but the sign.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def first_argmax(x: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The lowest index int64 [...] of the largest of ``x`` [..., n]; x holds no NaN.

    Only where ``allowed`` [..., n], if given; the last index where nothing is.
    """
    count = x.shape[-1]
    hit = x == x.amax(-1, keepdim=True)
    if allowed is not None:
        hit = hit & allowed
    index = torch.arange(count, device=x.device)
    return torch.where(hit, index, count - 1).amin(-1)
