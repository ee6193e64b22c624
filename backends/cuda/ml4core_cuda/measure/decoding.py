"""What a weight's bytes stand for, in plain torch on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import Weight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoded(weight: Weight) -> Tensor:
    """fp32 [N, K] of one matrix."""
    data, (rows, columns) = weight.data, weight.shape
    if weight.format in ("fp32", "bf16"):
        return data.float()
    if weight.format == "fp8_tensor":
        return data.view(torch.float8_e4m3fn).float() * weight.parts["scale"]
    if weight.format == "fp8_block":
        wide = weight.parts["scale"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return data.view(torch.float8_e4m3fn).float() * wide[:rows, :columns]
    nibbles = torch.stack((data & 15, data >> 4), -1).view(rows, columns).long()
    table = torch.tensor(_E2M1, device=data.device)
    values = table[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    scale = weight.parts["scale"]
    if weight.format == "nvfp4":
        each = scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
        return values * each * weight.parts["global_scale"].unsqueeze(1)
    return values * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
