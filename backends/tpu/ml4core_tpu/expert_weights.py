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


def packed_by_width(weight: Weight, halves: int, ranks: int) -> Weight:
    """The same of a stack of which ``ranks`` ranks have a part of each matrix, packed on its own
    and one after the other: rows where gate and up are two ``halves``, else columns. ``ValueError``
    if they don't divide into whole groups.
    """
    if ranks == 1:
        return packed_experts(weight, halves)
    rows, group = halves == 2, GROUPS[weight.format]
    size = weight.shape[1] // halves if rows else weight.shape[2] // group
    if size % ranks or (not rows and weight.shape[2] % group):
        what = "rows of gate and of up" if rows else f"groups of {group} columns"
        raise ValueError(f"{size} {what} of {weight.format} don't divide into {ranks} ranks")

    def cut(part: Tensor, rank: int) -> Tensor:
        if rows:
            return part.unflatten(1, (halves, ranks, -1))[:, :, rank].flatten(1, 2)
        return part if part.ndim < 3 else part.unflatten(2, (ranks, -1))[:, :, rank]

    def packed(rank: int) -> Weight:
        parts = {name: cut(part, rank) for name, part in weight.parts.items()}
        stack, height, width = weight.shape
        shape = (stack, height // ranks, width) if rows else (stack, height, width // ranks)
        return packed_experts(Weight(weight.format, shape, parts), halves)

    each = [packed(rank) for rank in range(ranks)]
    found = {
        name: torch.cat([one.parts[name] for one in each], 2 if rows else 1)
        for name in ("data", "scale")
    }
    scales = [one.parts["row_scale"] for one in each]
    found["row_scale"] = torch.cat(scales, 2) if rows else scales[0]
    return Weight(each[0].format, weight.shape, found)
