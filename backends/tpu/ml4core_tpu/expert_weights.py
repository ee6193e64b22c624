"""FP4 experts as their kernel reads them, made of the open formats at load."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.api import Weight
from ml4core.formats import e2m1
from ml4core_tpu.product_ops import GROUPS, PACKED

_LANES = 128
_HALF = 8  # groups of half a block


def packed_experts(weight: Weight, halves: int) -> Weight:
    """A stack of matrices [E, N, K] in nvfp4 or mxfp4, with the bytes of the kernel's layout: codes
    [E, K/2, N], scales [E, K/group, N], and a scale fp32 [E, 1, N] for each row.

    N is padded to a multiple of 128, each of its ``halves`` on its own (gate and up are two), and K
    to one of 16 groups; what is padded is zero.
    """
    group = GROUPS[weight.format]
    experts, _, width = weight.shape
    block = 2 * _HALF * group

    def rows(part: Tensor) -> Tensor:
        """[E, N, ...] with padded N."""
        each = part.unflatten(1, (halves, -1))
        short = -each.shape[2] % _LANES
        blank = each.new_zeros(experts, halves, short, *each.shape[3:])
        return torch.cat((each, blank), 2).flatten(1, 2)

    codes = F.pad(rows(e2m1.unpack(weight.data)), (0, -width % block))
    low, high = codes.unflatten(-1, (-1, 2, block // 2)).unbind(-2)
    data = (low | (high << 4)).flatten(-2).transpose(1, 2).contiguous()
    stored = rows(weight.parts["scale"])
    # A byte 0 is a scale of zero in E4M3, and a small one in E8M0, of codes that are zero.
    scale = F.pad(stored, (0, -stored.shape[-1] % (2 * _HALF))).transpose(1, 2).contiguous()
    if weight.format == "nvfp4":
        row_scale = rows(weight.parts["global_scale"].unsqueeze(-1))[..., 0]
    else:
        row_scale = torch.ones(scale.shape[0], scale.shape[2], device=scale.device)
    parts = {"data": data, "scale": scale, "row_scale": row_scale.unsqueeze(1).contiguous()}
    return Weight(PACKED + weight.format, weight.shape, parts)
