"""NVFP4: E2M1 elements in groups of 16, one e4m3fn scale a group, one float32 for the tensor.

Groups run along the last axis. Packed bytes are [..., K/2], scales [..., K/16]. The tensor's own
scale exists in two forms, one the reciprocal of the other, and every function here takes it by the
name of its form:

divisor      2688 / amax, `weight_global_scale` of compressed-tensors:
             value = code * (scale / divisor)
multiplier   amax / 2688, `weight_scale_2` of ModelOpt:
             value = code * (scale * multiplier)

2688 = 448 * 6, the largest scale times the largest code. Packed bytes and group scales are the
same in both forms. A tensor's scale may also be one for each part of it: any shape that broadcasts
against the group scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.formats import e2m1, e4m3
from ml4core.formats.blocks import check_multiple, finite_amax

GROUP = 16
RANGE = e4m3.E4M3FN.max * e2m1.MAX

# The least scale that isn't zero, 2**-9. A group too small for any scale gets this one: zeros come
# back as zeros, and nothing is ever divided by zero.
_MIN_SCALE_BYTE = 0x01
_AMAX_FLOOR = 2.0**-64  # keeps 2688 / amax, and scale / divisor, normal


def global_divisor(x: Tensor) -> Tensor:
    """2688 / amax over the finite values of `x`, float32 []; 1 if they are all zero."""
    amax = finite_amax(x.flatten())
    total = torch.full((), RANGE, dtype=torch.float32, device=x.device)
    return torch.where(amax > 0, total / amax.clamp(min=_AMAX_FLOOR), 1.0)


def global_multiplier(x: Tensor) -> Tensor:
    """amax / 2688 over the finite values of `x`, float32 []; 1 if they are all zero."""
    amax = finite_amax(x.flatten())
    total = torch.full((), RANGE, dtype=torch.float32, device=x.device)
    return torch.where(amax > 0, amax.clamp(min=_AMAX_FLOOR) / total, 1.0)


def reciprocal(global_scale: Tensor) -> Tensor:
    """A divisor as multiplier, or a multiplier as divisor, float32 [...].

    Rounded once: values decoded by the other form differ in the last bits of float32.
    """
    return torch.ones_like(global_scale, dtype=torch.float32) / global_scale.to(torch.float32)


def quantize(
    x: Tensor, *, divisor: Tensor | None = None, multiplier: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [..., K/2] and e4m3fn scales uint8 [..., K/16] of `x` [..., K].

    Give the global scale in one of its forms. A group's scale is the E4M3 of `divisor * (amax /
    6)`, or `(amax / 6) / multiplier`; it is 0x01..0x7E. Values that are not finite don't count for
    it: infinities become the largest code, NaN becomes +6, as the format has neither. ValueError
    if K is not a multiple of 16.
    """
    check_multiple(x.shape[-1], GROUP, "the last axis")
    groups = x.to(torch.float32).unflatten(-1, (-1, GROUP))
    amax = finite_amax(groups)
    unit = amax / torch.full((), e2m1.MAX, dtype=torch.float32, device=x.device)
    if _has_divisor(divisor, multiplier):
        wanted = unit * _scalar(divisor)
    else:
        wanted = unit / _scalar(multiplier)
    # Before the cast: an empty group under a global scale of 0 or infinity would be NaN.
    byte = e4m3.encode(torch.where(amax > 0, wanted, 0.0), "e4m3fn")
    byte = torch.where(byte == 0, _MIN_SCALE_BYTE, byte)
    factor = group_scale(byte, divisor=divisor, multiplier=multiplier)
    code = e2m1.encode(groups / torch.where(factor > 0, factor, 1.0).unsqueeze(-1))
    return e2m1.pack(code.flatten(-2)), byte


def dequantize(
    packed: Tensor,
    scale: Tensor,
    *,
    divisor: Tensor | None = None,
    multiplier: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values [..., K] in `dtype` of codes uint8 [..., K/2] and scales e4m3fn [..., K/16].

    Give the global scale in one of its forms. ValueError if the shapes do not belong together.
    """
    columns = 2 * packed.shape[-1]
    if scale.shape[-1] * GROUP != columns:
        raise ValueError(
            f"NVFP4 rows of {packed.shape[-1]} bytes need {columns / GROUP:g} scales, "
            f"got {scale.shape[-1]}"
        )
    factor = group_scale(scale, divisor=divisor, multiplier=multiplier)
    groups = e2m1.decode(e2m1.unpack(packed)).unflatten(-1, (-1, GROUP))
    return (groups * factor.unsqueeze(-1)).flatten(-2).to(dtype)


def group_scale(
    scale: Tensor, *, divisor: Tensor | None = None, multiplier: Tensor | None = None
) -> Tensor:
    """What the codes of each group are multiplied by, float32 [..., K/16].

    A scale byte of zero gives zero, whatever the global scale.
    """
    local = e4m3.decode(scale, "e4m3fn")
    if _has_divisor(divisor, multiplier):
        factor = local / _scalar(divisor)
    else:
        factor = local * _scalar(multiplier)
    # An empty tensor may come with a global scale of 0 or infinity.
    return torch.where(local == 0, 0.0, factor)


def _has_divisor(divisor: Tensor | None, multiplier: Tensor | None) -> bool:
    if (divisor is None) == (multiplier is None):
        given = "neither" if divisor is None else "both"
        raise ValueError(f"NVFP4 takes either divisor= or multiplier=, got {given}")
    return divisor is not None


def _scalar(global_scale: Tensor | None) -> Tensor:
    """A one-element global scale as float32 [], others as float32 of their shape."""
    assert global_scale is not None
    wide = global_scale.to(torch.float32)
    return wide.reshape(()) if wide.numel() == 1 else wide
