"""MXFP4: E2M1 elements in groups of 32 along the last axis, one E8M0 scale a group.

Packed bytes are [..., K/2], scales [..., K/32]. The exponent of a group with largest magnitude
amax, by rule:

floor     floor(log2 amax) - 2, the OCP standard. Clips where amax / scale is in (6, 8).
even      as floor, but one more where amax >= 1.75 * 2**floor(log2 amax): Quark and
          compressed-tensors. Clips where amax / scale is in (6, 7).
roundup   ceil(log2(amax / 6)). Clips nothing.
ceil      ceil(log2 amax) - 2. Clips nothing; amax / scale is at most 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ml4core.formats import e2m1, e8m0
from ml4core.formats.blocks import check_multiple, finite_amax
from ml4core.formats.exponent import carried_exponent

GROUP = 32

# What each rule adds to the fraction bits of amax: roundup carries above 1.5, as 6 is 1.5 * 2**2.
RULES: Mapping[str, int] = MappingProxyType(
    {"floor": 0x000000, "even": 0x200000, "roundup": 0x3FFFFF, "ceil": 0x7FFFFF}
)
_ELEMENT_EXPONENT = 2  # floor(log2 6)


def scale_exponent(amax: Tensor, rule: str) -> Tensor:
    """int32 exponents [...] for groups of largest magnitude `amax` [...], clamped to -127..127.

    An amax of 0 gives -127. ValueError for an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"unknown MXFP4 scale rule {rule!r}; known: {', '.join(RULES)}")
    exponent = carried_exponent(amax, RULES[rule]) - _ELEMENT_EXPONENT
    return exponent.clamp(e8m0.MIN_EXPONENT, e8m0.MAX_EXPONENT)


def quantize(x: Tensor, rule: str = "even") -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [..., K/2] and E8M0 scales uint8 [..., K/32] of `x` [..., K].

    Values that are not finite don't count for a group's scale: infinities become the largest code,
    NaN becomes +6, as the format has neither. ValueError if K is not a multiple of 32.
    """
    check_multiple(x.shape[-1], GROUP, "the last axis")
    groups = x.to(torch.float32).unflatten(-1, (-1, GROUP))
    exponent = scale_exponent(finite_amax(groups), rule)
    # 2**-exponent is a normal number where 2**exponent may be a denormal, so multiply.
    code = e2m1.encode(groups * e8m0.pow2(-exponent).unsqueeze(-1))
    return e2m1.pack(code.flatten(-2)), e8m0.from_exponent(exponent)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., K] in `dtype` of codes uint8 [..., K/2] and E8M0 scales uint8 [..., K/32].

    A scale of 0xFF makes its group NaN. ValueError if the shapes do not belong together.
    """
    columns = 2 * packed.shape[-1]
    if scale.shape[-1] * GROUP != columns:
        raise ValueError(
            f"MXFP4 rows of {packed.shape[-1]} bytes need {columns / GROUP:g} scales, "
            f"got {scale.shape[-1]}"
        )
    groups = e2m1.decode(e2m1.unpack(packed)).unflatten(-1, (-1, GROUP))
    return (groups * e8m0.decode(scale).unsqueeze(-1)).flatten(-2).to(dtype)
