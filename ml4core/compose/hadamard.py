"""The normalised Hadamard transform of the last dim."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] times H_D * D^-0.5 (Sylvester order); D a power of two. Orthogonal, so dot
    products stay.
    """
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, got width {dim}")
    shape = x.shape
    half = 1
    while half < dim:
        a, b = x.reshape(*shape[:-1], dim // (2 * half), 2, half).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).reshape(shape)
        half *= 2
    return x * dim**-0.5
