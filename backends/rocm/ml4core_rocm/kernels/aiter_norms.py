"""AITER's RMS norms, alone and with the sum of the residual."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core_rocm.aiter_functions import load


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The contract of ``rms_norm`` for bf16 rows; the weight is brought to bf16."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not rows.numel():
        return torch.empty_like(x)
    out: Tensor = load("rmsnorm2d_fwd")(rows, weight.to(x.dtype).contiguous(), eps)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, and its norm, both [T, H] in bf16: fresh tensors."""
    summed, out = torch.empty_like(residual), torch.empty_like(residual)
    if residual.numel():
        load("rmsnorm2d_fwd_with_add")(
            out, x.contiguous(), residual.contiguous(), summed, weight.to(x.dtype).contiguous(), eps
        )
    return summed, out
