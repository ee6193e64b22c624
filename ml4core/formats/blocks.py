"""Blocks along an axis: splitting, counting and the largest finite magnitude."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def block_count(size: int, block: int) -> int:
    """Blocks needed for `size` elements; the last one may be ragged."""
    return -(-size // block)


def split_last(x: Tensor, block: int) -> Tensor:
    """`x` [..., K] as [..., ceil(K / block), block], zeros after the end."""
    ragged = -x.shape[-1] % block
    if ragged:
        x = F.pad(x, (0, ragged))
    return x.unflatten(-1, (-1, block))


def join_last(x: Tensor, size: int) -> Tensor:
    """`x` [..., blocks, block] as [..., size], the padding cut off."""
    return x.flatten(-2)[..., :size]


def finite_amax(x: Tensor, dim: int = -1) -> Tensor:
    """Largest finite magnitude of `x` along `dim`, as float32; 0 where nothing is finite.

    An outlier that is not finite must not flatten its neighbours, so it does not count.
    """
    return torch.nan_to_num(x.to(torch.float32), nan=0.0, posinf=0.0, neginf=0.0).abs().amax(dim)


def check_multiple(size: int, block: int, what: str) -> None:
    """ValueError unless `size` is a whole number of blocks."""
    if size % block:
        padded = block_count(size, block) * block
        raise ValueError(f"{what} is {size}, not a multiple of {block}; pad it to {padded}")
